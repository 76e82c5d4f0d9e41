"""Equal calls are legalized once, with the same result as TVM's LegalizeOps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import build_main, compile_and_run
from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.passes.relax.legalize_ops import LegalizeOps

Formula = Callable[[relax.Expr, relax.Expr], list[relax.Expr]]
Eager = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]

CASES: dict[str, tuple[Formula, Eager]] = {
    "operands in another order, and the same twice": (
        lambda x, y: [op.subtract(x, y), op.subtract(y, x), op.subtract(x, x), op.add(x, x)],
        lambda x, y: [x - y, y - x, x - x, x + x],
    ),
    "numbers": (
        lambda x, y: [op.add(x, relax.const(n, "float32")) for n in (1.0, 2.0, 1.0)],
        lambda x, y: [x + 1, x + 2, x + 1],
    ),
    "constants of the same shape": (
        lambda x, y: [op.add(x, relax.const([n] * 4, "float32")) for n in (1.0, 2.0)],
        lambda x, y: [x + 1, x + 2],
    ),
    "attributes": (
        lambda x, y: [op.sum(x, 0), op.sum(x, 1), op.sum(x, 1, keepdims=True), op.sum(y, 1)],
        lambda x, y: [x.sum(0), x.sum(1), x.sum(1, keepdim=True), y.sum(1)],
    ),
    "tuples": (
        lambda x, y: [
            op.concat([x, y], 0),
            op.concat([y, x], 0),
            op.concat([x, x], 0),
            op.concat([x, y], 1),
            op.concat([x, y, x], 0),
        ],
        lambda x, y: [
            torch.cat([x, y]),
            torch.cat([y, x]),
            torch.cat([x, x]),
            torch.cat([x, y], 1),
            torch.cat([x, y, x]),
        ],
    ),
    "shapes": (
        lambda x, y: [op.reshape(x, (2, 8)), op.reshape(y, (8, 2)), op.reshape(y, (2, 8))],
        lambda x, y: [x.reshape(2, 8), y.reshape(8, 2), y.reshape(2, 8)],
    ),
    "bounds": (
        lambda x, y: [op.strided_slice(v, [0], [b], [b + 2]) for v in (x, y) for b in (0, 1)],
        lambda x, y: [v[b : b + 2] for v in (x, y) for b in (0, 1)],
    ),
    "several functions for one call": (
        lambda x, y: [op.power(v, relax.const(3.0, "float32")) for v in (x, y)],
        lambda x, y: [x**3, y**3],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_module_is_that_of_legalize_ops(name: str) -> None:
    formula, eager = CASES[name]
    x, y = torch.randn(2, 4, 4)
    mod = build_main([x, y], formula)
    alone = relax.transform.LegalizeOps(LEGALIZE_MAP)(mod)
    tvm.ir.assert_structural_equal(LegalizeOps()(mod), alone)
    torch.testing.assert_close(compile_and_run(mod, x, y), eager(x, y))


def test_equal_calls_are_legalised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    genuine = LEGALIZE_MAP["relax.tanh"]

    def counted(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        seen.append(call)
        return genuine(builder, call)

    monkeypatch.setitem(LEGALIZE_MAP, "relax.tanh", counted)

    def formula(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
        return [op.tanh(v) for v in (x, y, x, y)]

    x = torch.randn(4, 4)
    LegalizeOps()(build_main([x, x], formula))
    assert len(seen) == 1
    LegalizeOps()(build_main([x, torch.randn(2, 2)], formula))
    assert len(seen) == 3, "another module has functions of its own, another type its loops"
