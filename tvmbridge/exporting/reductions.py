"""Compute reductions in forms that the frontend leaves to PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.passes.base import dtype_of, shape_of

Spell = Callable[[relax.BlockBuilder, Call, Arguments], Expr | None]
_NARROW = ("bool", "uint8", "int8", "int16")


def _product(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return a product of all elements, or of those along a dimension, in the result's dtype."""
    x, dtype = arguments["self"], dtype_of(call)
    if not shape_of(x):
        return relax.op.astype(x, dtype)
    wide = x if dtype_of(x) == dtype else bb.emit(relax.op.astype(x, dtype))
    dim, keep = arguments.values.get("dim"), bool(arguments.values.get("keepdim"))
    return relax.op.prod(wide, None if dim is None else int(dim), keep)


def _extremum(operator: Callable[..., Expr]) -> Spell:
    """Return a function for the extremum of integers."""

    def spell(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
        x, dtype = arguments["self"], dtype_of(call)
        if "int" not in dtype or not shape_of(x):
            return None
        dims: Any = [int(d) for d in arguments["dim"]] or None
        wide = bb.emit(relax.op.astype(x, "int32")) if dtype in _NARROW else x
        found = operator(wide, dims, bool(arguments["keepdim"]))
        return relax.op.astype(bb.emit(found), dtype) if dtype in _NARROW else found

    return spell


REDUCTIONS: dict[str, Spell] = {
    "aten.prod.default": _product,
    "aten.prod.dim_int": _product,
    "aten.amax.default": _extremum(relax.op.max),
    "aten.amin.default": _extremum(relax.op.min),
}
"""Functions that build the Relax of an operator; None for arguments that they do not support."""
