"""Calls of TIR functions that only copy a tensor in its order become reshapes, without a copy.

TVM's pass of this name computes offsets within a buffer in 32 bits, and raises if a buffer has more
than 2**31 elements. It sees other loops in place of functions with such buffers.

Before::

    y = R.call_tir(cls.reshape, (x,), out_ty=R.Tensor((8, 2)))

After::

    y = R.reshape(x, R.shape([8, 2]))

Requires: functions are not scheduled, because reshapes are recognized by their loops.
Guarantees: all functions stay as they are; whether a call becomes a reshape does not depend on the
number of elements.
Runs after: FuseTIR. Runs before: schedules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te, tirx

from tvmbridge.core.decisions import at_one_size
from tvmbridge.passes.base import PassReport, RelaxPass
from tvmbridge.schedules import is_reshape
from tvmbridge.schedules.kernel import parse

_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class RewriteDataflowReshape(RelaxPass):
    """Run TVM's RewriteDataflowReshape."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        large = {
            name: function
            for name, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc)
            and max(_elements(function), default=0) > _MOST_ELEMENTS
        }
        if not large:
            return relax.transform.RewriteDataflowReshape()(mod)
        small = {name: _small(function) for name, function in large.items()}
        rewritten = relax.transform.RewriteDataflowReshape()(_with(mod, small))
        return _with(rewritten, large)


def _with(mod: tvm.IRModule, changed: Mapping[Any, tirx.PrimFunc]) -> tvm.IRModule:
    functions = {name: changed.get(name, f) for name, f in mod.functions_items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _small(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function with small buffers or none, which is a reshape if ``function`` is one."""
    if not _is_reshape(function):
        return function.with_body(tirx.Evaluate(0))
    x = te.placeholder((2, 3), name="x")
    return te.create_prim_func([x, te.compute((6,), lambda i: x[i // 3, i % 3])])


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
