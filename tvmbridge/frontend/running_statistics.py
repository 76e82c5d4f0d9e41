"""The update of batch norm's running statistics."""

from __future__ import annotations

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer


def moved(
    ctx: Importer, old: relax.Expr, new: relax.Expr, momentum: float, dtype: torch.dtype
) -> relax.Expr:
    """Return ``momentum * new + (1 - momentum) * old``, computed in ``dtype``."""
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
    """Return the new running mean and variance as PyTorch's CPU kernel for bfloat16 computes them.

    The kernel rounds the result of every operation, the factors and the count to bfloat16. Over
    many updates its statistics differ from once-rounded ones by more than one rounding.

    Args:
        count: the number of elements of a channel.
        momentum: the weight of the batch's statistics.
    """
    half, wide = torch.bfloat16, torch.float32

    def scaled(value: relax.Expr, factor: float) -> relax.Expr:
        return ctx.emit(relax.op.multiply(value, ctx.tensor(factor, half)))

    kept = [scaled(ctx.value(node), 1.0 - momentum) for node in old]
    mean = ctx.emit(relax.op.add(scaled(ctx.cast(batch[0], wide, half), momentum), kept[0]))
    squares = ctx.emit(relax.op.multiply(batch[1], ctx.tensor(float(count), wide)))
    total = ctx.cast(squares, wide, half)
    unbiased = ctx.emit(relax.op.divide(total, ctx.tensor(float(count - 1), half)))
    # This product is the only value that the kernel does not round.
    share = float(torch.tensor(momentum, dtype=half))
    taken = ctx.emit(relax.op.multiply(ctx.cast(unbiased, half, wide), ctx.tensor(share, wide)))
    variance = ctx.emit(relax.op.add(taken, ctx.cast(kept[1], half, wide)))
    return [mean, ctx.cast(variance, wide, half)]
