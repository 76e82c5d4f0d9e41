"""The spec of each ATen call gets the shapes and dtypes that the graph expects of its results.

Before::

    lv: R.Tensor((3, 4), "float32") = R.call_pure_packed(
        "tvmbridge.aten", '{"op": "my.scan.default", ...}', x)

After::

    lv: R.Tensor((3, 4), "float32") = R.call_pure_packed(
        "tvmbridge.aten", '{"op": "my.scan.default", ..., "declared": [[[3, 4], "float32"]]}', x)

The spec is the JSON that describes the operator and its arguments. Compiled code that reads a
result assumes memory of the declared size, without a check. So the call itself raises if a kernel
returns another shape or dtype than its fake kernel (``kernels/results.py``).

Requires: static shapes. Guarantees: the spec of every ATen call declares its results.
Runs after: all passes that read specs or change shapes. Runs before: NameSpecs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import aten_call_operator, spec_of
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls


@dataclass(frozen=True)
class DeclareResults(RelaxPass):
    """Write the types of ATen calls into their specs."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_calls(mod, lambda call, _: _declared(call, report), report)


def _declared(call: relax.Call, report: PassReport) -> relax.Expr:
    if aten_call_operator(call) is None:
        return call
    (type_,) = call.ty_args
    types = type_.fields if isinstance(type_, relax.TupleType) else [type_]
    declared = [[[int(n) for n in t.shape.values], str(t.dtype)] for t in types]
    content = spec_of(call)
    if content.get("declared") == declared:
        return call
    report.rewrote()
    spec = tvm.ir.StringImm(json.dumps({**content, "declared": declared}))
    return relax.Call(call.op, [call.args[0], spec, *call.args[2:]], call.attrs, call.ty_args)
