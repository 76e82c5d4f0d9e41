"""Express attention in Relax: two batches of matrix products with a softmax between them."""

from __future__ import annotations

import math

from tvm import relax
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.passes.base import dtype_of, shape_of


def attention(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return the Relax of ``scaled_dot_product_attention``; None if it has dropout."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    shapes = [shape_of(tensor) for tensor in (query, key, value)]
    if any(s is None for s in shapes) or arguments["dropout_p"]:
        return None
    (*batch, rows, depth), (*_, columns, _), (*_, width) = (s or () for s in shapes)
    dtype = dtype_of(query)
    scale = arguments["scale"]
    scale = 1 / math.sqrt(depth) if scale is None else scale
    if arguments["enable_gqa"] and (shapes[1] or ())[-3] != batch[-1]:
        key, value = (_repeated(bb, t, batch[-1]) for t in (key, value))
    if any(list((shape_of(t) or ())[:-2]) != batch for t in (key, value)):
        key = bb.emit(relax.op.broadcast_to(key, [*batch, columns, depth]))
        value = bb.emit(relax.op.broadcast_to(value, [*batch, columns, width]))
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    query, key, value = (_cast(bb, tensor, wide) for tensor in (query, key, value))
    scaled = bb.emit(relax.op.multiply(query, relax.const(scale, wide)))
    axes = [*range(len(batch)), len(batch) + 1, len(batch)]
    scores = bb.emit(relax.op.matmul(scaled, bb.emit(relax.op.permute_dims(key, axes))))
    mask = arguments["attn_mask"]
    if arguments["is_causal"]:
        ones = relax.op.full((rows, columns), relax.const(True, "bool"), "bool")
        mask = bb.emit(relax.op.tril(bb.emit(relax.op.astype(bb.emit(ones), wide))))
        mask = bb.emit(relax.op.greater(mask, relax.const(0, wide)))
    weights = _softmax(bb, scores, mask, wide)
    return _cast(bb, bb.emit(relax.op.matmul(weights, value)), dtype)


def _cast(bb: relax.BlockBuilder, tensor: Expr, dtype: str) -> Expr:
    return tensor if dtype_of(tensor) == dtype else bb.emit(relax.op.astype(tensor, dtype))


def _repeated(bb: relax.BlockBuilder, tensor: Expr, heads: int) -> Expr:
    """Return ``tensor`` with each head repeated, so that there are ``heads`` of them."""
    shape = shape_of(tensor) or ()
    return bb.emit(relax.op.repeat(tensor, heads // shape[-3], len(shape) - 3))


def _softmax(bb: relax.BlockBuilder, scores: Expr, mask: Expr | None, dtype: str) -> Expr:
    """Return the softmax of masked scores; a row with all scores masked is zero, as in PyTorch."""
    if mask is None:
        return bb.emit(relax.op.nn.softmax(scores, -1))
    if dtype_of(mask) == "bool":
        lowest = relax.const(-math.inf, dtype)
        scores = bb.emit(relax.op.where(mask, scores, lowest))
    else:
        scores = bb.emit(relax.op.add(scores, _cast(bb, mask, dtype)))
    largest = bb.emit(relax.op.max(scores, -1, keepdims=True))
    nothing = bb.emit(relax.op.equal(largest, relax.const(-math.inf, dtype)))
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    largest = bb.emit(relax.op.where(nothing, zero, largest))
    powers = bb.emit(relax.op.exp(bb.emit(relax.op.subtract(scores, largest))))
    total = bb.emit(relax.op.sum(powers, -1, keepdims=True))
    total = bb.emit(relax.op.where(nothing, one, total))
    return bb.emit(relax.op.divide(powers, total))
