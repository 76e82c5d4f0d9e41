"""Calls of TIR functions that only copy a tensor in its order become reshapes, without a copy.

TVM's pass of this name computes offsets within a buffer in 32 bits, and raises if a buffer has more
than 2**31 elements. Functions with such buffers are judged here, with offsets of 64 bits.

Before::

    y = R.call_tir(cls.reshape, (x,), out_ty=R.Tensor((8, 2)))

After::

    y = R.reshape(x, R.shape([8, 2]))

Requires: functions are not scheduled, because reshapes are recognized by their loops.
Guarantees: whether a call becomes a reshape does not depend on the number of elements.
Runs after: FuseTIR. Runs before: schedules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from tvmbridge.core.decisions import at_one_size
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls
from tvmbridge.schedules import is_reshape
from tvmbridge.schedules.kernel import parse

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class RewriteDataflowReshape(RelaxPass):
    """Run TVM's RewriteDataflowReshape, and the same for functions with larger buffers."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        large = {
            name: function
            for name, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc)
            and max(_elements(function), default=0) > _MOST_ELEMENTS
        }
        if not large:
            return relax.transform.RewriteDataflowReshape()(mod)
        # TVM takes a function without stores for no reshape.
        empty = {name: f.with_body(tirx.Evaluate(0)) for name, f in large.items()}
        found = relax.transform.RewriteDataflowReshape()(_with(mod, empty))
        reshapes = {name for name, function in large.items() if _is_reshape(function)}

        def rewrite(call: relax.Call, _: relax.BlockBuilder) -> relax.Expr:
            if call.op != _CALL_TIR or call.args[0] not in reshapes:
                return call
            return relax.op.reshape(call.args[1].fields[0], call.ty_args[0].shape)

        return map_calls(_with(found, large), rewrite)


def _with(mod: tvm.IRModule, functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc]) -> tvm.IRModule:
    """Return ``mod`` with other ``functions``."""
    return tvm.IRModule(
        {**dict(mod.functions_items()), **functions},
        attrs=mod.attrs,
        global_infos=mod.global_infos,
    )


def _is_reshape(function: tirx.PrimFunc) -> bool:
    # A slice of the first rows is in order as well, and has fewer elements.
    if len(function.params) != 2 or len(set(_elements(function))) != 1:
        return False
    with at_one_size():
        kernel = parse(function)
        return kernel is not None and is_reshape(kernel)


def _elements(function: tirx.PrimFunc) -> list[int]:
    """Return the number of elements of each argument whose extents are numbers."""
    # Scalar arguments have no shape.
    shapes = [getattr(param, "shape", ()) for param in function.params]
    return [
        math.prod(int(extent) for extent in shape)
        for shape in shapes
        if all(isinstance(extent, tirx.IntImm) for extent in shape)
    ]
