"""NameSpecs: the specs of kernel calls are replaced by short keys."""

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
from tvmbridge.kernels.keys import key_of, spec_named
from tvmbridge.kernels.matmul import MATMUL, matmul_spec
from tvmbridge.passes.relax.name_specs import NameSpecs

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
LOG1P = '{"op": "aten.log1p.default", "args": [{"tensor": 0}], "kwargs": {}, "results": null}'
PRODUCT = matmul_spec((None, ((4, 3), (1, 4))), (3, 3))


def _calls(aten: str, product: str, callee: str = MATMUL) -> tvm.IRModule:
    def formula(x: relax.Var) -> list[relax.Expr]:
        pure = relax.op.call_pure_packed(
            "tvmbridge.aten", tvm.ir.StringImm(aten), x, ty_args=[x.ty]
        )
        operands = relax.Tuple([tvm.ir.StringImm(product), x, x])
        type_ = relax.TensorType((3, 3), "float64")
        return [pure, relax.op.call_dps_packed(callee, operands, out_ty=type_)]

    return build_main([X], formula)


def test_specs_become_keys() -> None:
    before = _calls(LOG1P, PRODUCT)
    after, report = apply_pass(NameSpecs(), before)
    tvm.ir.assert_structural_equal(after, _calls(key_of(LOG1P), key_of(PRODUCT)))
    assert report.rewrites == 2
    assert_changes_nothing(NameSpecs(), after)


def test_the_results_are_the_same() -> None:
    logarithm, product = compile_and_run(_calls(LOG1P, PRODUCT), X)
    torch.testing.assert_close(logarithm, X.log1p(), equal_nan=True)
    torch.testing.assert_close(product, X @ X.T)


def test_strings_of_other_functions_stay() -> None:
    mod = build_main([X], lambda x: call_overload("aten.log1p.default", [{"tensor": 0}], [x], x.ty))
    assert NameSpecs()(mod) is not mod
    foreign = _calls("short", PRODUCT, "somebody.else")
    assert_changes_nothing(NameSpecs(), foreign)


def test_keys_are_short_and_lead_back() -> None:
    specs = [f"a spec with the number {n}" for n in range(300)]
    keys = [key_of(s) for s in specs]
    assert max(map(len, keys)) <= 7
    assert len(set(keys)) == 300
    assert [spec_named(k) for k in keys] == specs
    assert [key_of(s) for s in specs] == keys
    assert spec_named(specs[0]) == specs[0]
