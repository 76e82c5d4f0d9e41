"""A concatenation in code for any size: the place within a piece is an expression of its own.

TVM's simplifier merges the start of a piece into quotients and remainders of the place. What is
left depends on the remainder of the start, so that at two sizes the code would not be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Call, Expr
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.core.decisions import sizes_vary


def concat(upstream: LegalizeFunc) -> LegalizeFunc:
    """Return TVM's legalisation, but for code for any size.

    Along the last axis it is TVM's as well: vectors are read there from a place of their own.
    """

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        axis, rank = call.attrs.axis, call.ty.ndim
        if not sizes_vary() or axis is None or int(axis) % rank == rank - 1:
            return upstream(bb, call)
        given = call.args[0]
        while isinstance(given, relax.Var):
            binding = bb.lookup_binding(given)
            if not isinstance(binding, relax.Tuple | relax.Var):
                return upstream(bb, call)
            given = binding
        return bb.call_te(_concatenated, list(given.fields), int(axis) % rank)

    return legalize


def _concatenated(pieces: Sequence[Any], axis: int) -> Any:
    extents = [int(piece.shape[axis]) for piece in pieces]
    shape = [*pieces[0].shape]
    shape[axis] = tirx.IntImm("int64", sum(extents))

    def at(*index: Expr) -> Expr:
        start, value = sum(extents), None
        for piece, extent in zip(reversed(pieces), reversed(extents), strict=True):
            start -= extent
            place = index[axis] - tirx.IntImm("int64", start) if start else index[axis]
            if extent == 1:
                place = tirx.IntImm("int64", 0)
            elif value is None or start:
                place = tirx.Max(place, tirx.IntImm("int64", 0))
            element = piece(*index[:axis], place, *index[axis + 1 :])
            if value is None:
                value = element
            else:
                here = index[axis] < tirx.IntImm("int64", start + extent)
                value = tirx.if_then_else(here, element, value)
        return value

    return te.compute(shape, at, name="T_concat", tag="injective")
