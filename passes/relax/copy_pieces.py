"""Concatenations and splits of many pieces become calls of PyTorch's kernels.

Before::

    a: R.Tuple(...) = R.split(x, 100, axis=1)
    gv = R.concat((b0, b1, ..., b99), axis=1)

After::

    a: R.Tuple(...) = R.call_pure_packed(
        "tvmbridge.aten", '{"op": "aten.split_with_sizes_copy.default", ...}', x)
    gv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.cat.default", ...}', b0, b1, ..., b99)

As a loop, a concatenation would select the piece of each element by a chain of comparisons. FuseOps
would also fuse the computations of all pieces into that loop: one large function instead of small
ones that are shared by equal pieces. As a loop, a split of n pieces would be one function of n
results, which takes LLVM longer to compile than n functions.

Requires: static shapes. Guarantees: concatenations and splits of fewer pieces are untouched.
Runs after: the split into forward and backward (TVM's Gradient does not go through external calls).
Runs before: LegalizeOps, DeclareResults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import ATEN_CALL, call_overload, packed_call
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls

_MOST = 16


@dataclass(frozen=True)
class CopyPieces(RelaxPass):
    """Call PyTorch's kernel for concatenations of, and splits into, more than 16 tensors."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_calls(mod, lambda call, _: self._copied(call, report), report)

    def _copied(self, call: relax.Call, report: PassReport) -> relax.Expr:
        name = getattr(call.op, "name", "")
        if name == "relax.concat":
            (pieces,) = call.args
            count = len(pieces.fields) if isinstance(pieces, relax.Tuple) else 0
        elif name == "relax.split":
            count = len(call.ty.fields)
        else:
            return call
        if count <= _MOST:
            return call
        if call.attrs.axis is None:
            report.decline(name, "it flattens")
            return call
        report.rewrote()
        return _joined(call) if name == "relax.concat" else _split(call, count)


def _joined(call: relax.Call) -> relax.Expr:
    tensors = list(call.args[0].fields)
    places = [{"tensor": number} for number in range(len(tensors))]
    return call_overload("aten.cat.default", [places, int(call.attrs.axis)], tensors, call.ty)


def _split(call: relax.Call, count: int) -> relax.Expr:
    axis = int(call.attrs.axis)
    spec = {
        "op": "aten.split_with_sizes_copy.default",
        "args": [{"tensor": 0}, [int(f.shape.values[axis]) for f in call.ty.fields], axis],
        "kwargs": {},
        "results": list(range(count)),
    }
    return packed_call(ATEN_CALL, json.dumps(spec), [call.args[0]], call.ty)
