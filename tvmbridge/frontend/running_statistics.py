"""How batch norm moves its running statistics."""

from __future__ import annotations

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer


def moved(
    ctx: Importer, old: relax.Expr, new: relax.Expr, momentum: float, dtype: torch.dtype
) -> relax.Expr:
    """momentum new + (1 - momentum) old, all in ``dtype``."""
    taken = ctx.emit(relax.op.multiply(new, ctx.tensor(momentum, dtype)))
    kept = ctx.emit(relax.op.multiply(old, ctx.tensor(1.0 - momentum, dtype)))
    return ctx.emit(relax.op.add(taken, kept))


def moved_as_bfloat16(
    ctx: Importer,
    old: tuple[fx.Node, fx.Node],
    batch: tuple[relax.Expr, relax.Expr],
    count: int,
    momentum: float,
) -> list[relax.Expr]:
    """The running mean and variance as PyTorch's CPU kernel for bfloat16 moves them.

    It rounds every step, its factors and the count too. Over many steps that takes the statistics
    further from those that are rounded once than a single rounding would.

    Args:
        ctx: where operators are emitted.
        old: the running mean and variance, in bfloat16.
        batch: the batch's mean and biased variance, in float32.
        count: the elements of a channel.
        momentum: the share of the batch.
    """
    half, wide = torch.bfloat16, torch.float32

    def scaled(value: relax.Expr, factor: float) -> relax.Expr:
        return ctx.emit(relax.op.multiply(value, ctx.tensor(factor, half)))

    kept = [scaled(ctx.value(node), 1.0 - momentum) for node in old]
    mean = ctx.emit(relax.op.add(scaled(ctx.cast(batch[0], wide, half), momentum), kept[0]))
    squares = ctx.emit(relax.op.multiply(batch[1], ctx.tensor(float(count), wide)))
    total = ctx.cast(squares, wide, half)
    unbiased = ctx.emit(relax.op.divide(total, ctx.tensor(float(count - 1), half)))
    # The product alone is not rounded.
    share = float(torch.tensor(momentum, dtype=half))
    taken = ctx.emit(relax.op.multiply(ctx.cast(unbiased, half, wide), ctx.tensor(share, wide)))
    variance = ctx.emit(relax.op.add(taken, ctx.cast(kept[1], half, wide)))
    return [mean, ctx.cast(variance, wide, half)]
