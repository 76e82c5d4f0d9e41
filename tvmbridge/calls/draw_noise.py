"""Make the random draws of a call with PyTorch, before the compiled code runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.core.bernoulli import draw_mask
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.types import EagerPrologue, NoiseDescriptor, TensorSpec


def draw_noise(
    noise: Sequence[NoiseDescriptor],
    prologue: EagerPrologue | None = None,
    inputs: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Make the random draws with PyTorch's generators and return them in order, contiguous.

    Raises:
        UnsupportedOperatorError: a draw has another shape or dtype than its descriptor.
    """
    if prologue is None:
        return [_draw(descriptor).contiguous() for descriptor in noise]
    with torch.no_grad():
        drawn = prologue.module(*(tensor.detach() for tensor in inputs))
    for draw, descriptor in zip(drawn, noise, strict=True):
        found, foretold = TensorSpec.of(draw), descriptor.spec
        if (found.shape, found.dtype) != (foretold.shape, foretold.dtype):
            raise UnsupportedOperatorError(
                f"{descriptor.op} draws {found}, where PyTorch's tracing foretells {foretold}"
            )
    return [draw.contiguous() for draw in drawn]


def _draw(descriptor: NoiseDescriptor) -> torch.Tensor:
    args = [_materialize(a) for a in descriptor.args]
    if descriptor.op is torch.ops.aten.bernoulli_.float and not descriptor.kwargs:
        return draw_mask(*args)
    kwargs = {k: _materialize(v) for k, v in descriptor.kwargs.items()}
    result: Any = descriptor.op(*args, **kwargs)
    drawn: torch.Tensor = result if descriptor.result is None else result[descriptor.result]
    return drawn


def _materialize(value: Any) -> Any:
    return value.empty() if isinstance(value, TensorSpec) else value
