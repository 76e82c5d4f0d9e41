"""RemoveBorders: the markers at boundaries of custom functions are replaced by their operands."""

from __future__ import annotations

import torch
import tvm
from tvm import relax

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
)
from tvmbridge.kernels.aten_call import call_overload
from tvmbridge.kernels.borders import function_entered
from tvmbridge.passes.relax.drop_cotangents import DropCotangents
from tvmbridge.passes.relax.remove_borders import RemoveBorders

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)


def _enters(x: relax.Expr, number: int) -> relax.Call:
    return call_overload("tvmbridge.enters.default", [{"tensor": 0}, number], [x], x.ty)


def _leaves(x: relax.Expr, gradient: relax.Expr) -> relax.Call:
    args = [{"tensor": 0}, [{"tensor": 1}]]
    return call_overload("tvmbridge.leaves.default", args, [x, gradient], x.ty)


def test_borders_are_what_they_hand_on() -> None:
    before = build_main([X, X], lambda x, y: [_enters(x, 3), _leaves(x, y), relax.op.exp(y)])
    after, report = apply_pass(RemoveBorders(), before)
    tvm.ir.assert_structural_equal(after, build_main([X, X], lambda x, y: [x, x, relax.op.exp(y)]))
    assert report.rewrites == 2
    assert_changes_nothing(RemoveBorders(), after)


def test_with_them_the_results_are_the_same() -> None:
    mod = build_main([X, X], lambda x, y: [_enters(x, 3), _leaves(y, x)])
    torch.testing.assert_close(compile_and_run(mod, X, 2 * X), [X, 2 * X])


def test_other_calls_stay() -> None:
    mod = build_main([X], lambda x: call_overload("aten.log1p.default", [{"tensor": 0}], [x], x.ty))
    assert_changes_nothing(RemoveBorders(), mod)


def test_functions_that_are_called_get_zeros_for_what_does_not_arrive() -> None:
    def formula(x: relax.Var, a: relax.Var, b: relax.Var) -> list[relax.Expr]:
        called, other = _enters(b, 0), _enters(b, 1)
        assert (function_entered(called), function_entered(relax.op.exp(b))) == (0, None)
        return [called, other, _leaves(x, a), a]

    before = build_main([X, X, X], formula)
    dropped = DropCotangents(("x1", "x2"), ("x2",), frozenset({0}))
    after = RemoveBorders()(dropped(before))
    zeros = [str(b.value.op.name) for b in after["main"].body.blocks[0].bindings[1:3]]
    assert zeros == ["relax.call_pure_packed", "relax.zeros"]
    results = compile_and_run(after, X, 2 * X)
    torch.testing.assert_close(results, [torch.zeros_like(X)] * 2 + [X, 2 * X])
