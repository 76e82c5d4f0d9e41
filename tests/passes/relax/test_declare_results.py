"""DeclareResults: the specs of ATen calls get the shapes and dtypes that the graph expects."""

from __future__ import annotations

import json

import torch
import tvm
from tvm import relax

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
)
from tvmbridge.kernels.aten_call import ATEN_CALL, call_overload, packed_call
from tvmbridge.passes.relax.declare_results import DeclareResults

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
SORT = {"op": "aten.sort.default", "args": [{"tensor": 0}], "kwargs": {}, "results": [0, 1]}


def _calls(spec: str, rest: str = "") -> tvm.IRModule:
    def formula(x: relax.Var) -> list[relax.Expr]:
        pair = relax.TupleType([x.ty, relax.TensorType((3, 4), "int64")])
        other = relax.op.call_pure_packed(
            "somebody.else", tvm.ir.StringImm('{"op": "x"}'), x, ty_args=[x.ty]
        )
        return [relax.TupleGetItem(packed_call(ATEN_CALL, spec, [x], pair), 1), other]

    return build_main([X], formula)


def test_the_types_of_results_stand_in_the_spec() -> None:
    before = _calls(json.dumps(SORT))
    after, report = apply_pass(DeclareResults(), before)
    declared = [[[3, 4], "float64"], [[3, 4], "int64"]]
    tvm.ir.assert_structural_equal(after, _calls(json.dumps({**SORT, "declared": declared})))
    assert report.rewrites == 1
    assert_changes_nothing(DeclareResults(), after)


def test_what_is_no_aten_call_stays() -> None:
    mod = build_main([X], lambda x: call_overload("aten.log1p.default", [{"tensor": 0}], [x], x.ty))
    assert_changes_nothing(DeclareResults(), DeclareResults()(mod))
    assert_changes_nothing(DeclareResults(), build_main([X], relax.op.exp))
