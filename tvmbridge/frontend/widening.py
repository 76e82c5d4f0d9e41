"""Convert operators on half precision by converters that know only float32.

Operands are cast to float32, and results are rounded once, as PyTorch's kernels do. Python numbers
among the arguments are not rounded to half precision either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.core.torch_private import pytree
from tvmbridge.frontend.registry import HALVES, Converter

WIDE = torch.float32


def convert_widened(ctx: Any, node: fx.Node, converter: Converter) -> Any:
    """Convert ``node`` in float32, and round the results to the dtypes of the node's results.

    Raises:
        Declined: the converter declines.
    """
    graph, stand_ins = fx.Graph(), {}
    half = _promoted([source.meta["val"] for source in node.all_input_nodes])
    for source in node.all_input_nodes:
        stand_in = stand_ins[source] = graph.placeholder(source.name)
        fake, value = source.meta["val"], ctx.values[source]
        if half is not None and fake.is_floating_point() and not fake.dim():
            fake, value = fake.to(half), ctx.cast(value, fake.dtype, half)
        stand_in.meta = {"val": _widened(fake)}
        ctx.values[stand_in] = ctx.cast(value, fake.dtype, WIDE) if _is_half(fake) else value
    args, kwargs = fx.node.map_aggregate(
        fx.node.map_arg((node.args, node.kwargs), stand_ins.__getitem__), _widened
    )
    wide = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    results = node.meta["val"]
    wide.meta = {**node.meta, "val": pytree.tree_map(_widened, results)}
    result = converter.function(ctx, wide, *args, **kwargs)
    if not isinstance(result, tuple):
        return _rounded(ctx, result, results)
    return tuple(_rounded(ctx, r, fake) for r, fake in zip(result, results, strict=True))


def _promoted(operands: Sequence[Any]) -> torch.dtype | None:
    """Return the half precision that PyTorch promotes ``operands`` to, or None.

    PyTorch rounds 0-d operands to the dtype of the others.
    """
    sized = {t.dtype for t in operands if t.is_floating_point() and t.dim()}
    return next(iter(sized)) if len(sized) == 1 and sized <= HALVES else None


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALVES


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDE if value in HALVES else value
    return value.to(WIDE) if _is_half(value) else value


def _rounded(ctx: Any, result: Any, fake: Any) -> Any:
    return ctx.cast(result, WIDE, fake.dtype) if _is_half(fake) else result
