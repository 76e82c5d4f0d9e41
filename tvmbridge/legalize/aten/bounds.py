"""Bounds checks of indices: a loop that raises an error at run time, as eager PyTorch does."""

from __future__ import annotations

import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import Expr, GenericConst, StringImm

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.legalize.broadcast import OPAQUE, shape_of
from tvmbridge.legalize.lets import constant, dtype_of


def checked(
    bb: relax.BlockBuilder, indices: Expr, extent: int, error: str, *, negative: bool
) -> Expr:
    """Emit a loop that checks indices into a dimension, and return the checked indices.

    Args:
        error: the name of the exception that an index outside of the bounds raises at run time.
        negative: whether indices from ``-extent`` on count from the end; they are replaced by
            non-negative ones.

    Returns:
        The non-negative indices; ``indices`` itself if it is a constant within the bounds.
    """
    if isinstance(indices, GenericConst):
        values = indices.value.numpy()
        if values.min() >= 0 and values.max() < extent:
            return indices
    source = te.placeholder(shape_of(indices), str(indices.ty.dtype.dtype), "indices")
    function = te.create_prim_func([source, _from_the_end(source, extent, negative)])
    function = _with_assertion(function, extent, error, -extent if negative else 0)
    name = bb.add_func(
        function.with_attrs({"op_pattern": OPAQUE, "tirx.is_scheduled": True}), "checked_indices"
    )
    return bb.emit(relax.call_tir(name, [indices], out_ty=indices.ty))


def _from_the_end(source: te.Tensor, extent: int, negative: bool) -> te.Tensor:
    zero, size = constant(0, str(source.dtype)), constant(extent, str(source.dtype))

    def wrapped(*i: Expr) -> Expr:
        value = source(*i)
        return tirx.Select(value < zero, value + size, value) if negative else value + zero

    return te.compute(source.shape, wrapped, name="checked")


def _with_assertion(function: tirx.PrimFunc, extent: int, error: str, least: int) -> tirx.PrimFunc:
    source = function.params[0]

    def guarded(store: tirx.BufferStore) -> tirx.Stmt:
        value = tirx.BufferLoad(source, store.indices)
        dtype = dtype_of(value)
        inside = tirx.And(value >= constant(least, dtype), value < constant(extent, dtype))
        # Code for symbolic sizes is compiled at several sizes, which must not differ in a text.
        size = "" if sizes_vary() else f" with size {extent}"
        message = [StringImm(f"index out of bounds for a dimension{size}")]
        return tirx.SeqStmt([tirx.AssertStmt(inside, StringImm(error), message), store])

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.BufferStore, guarded)))
