"""Inputs of a comparison: what they are called, and what they hold after forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tvmbridge.inspect.compare.eager import state_name
from tvmbridge.inspect.compare.trace import TraceBuilder
from tvmbridge.types import InputDescriptor, InputKind, OutputAlias


def title(descriptor: InputDescriptor) -> str:
    """The name of an input as users know it."""
    if descriptor.kind is InputKind.USER:
        return f"input {descriptor.position}"
    return descriptor.target or descriptor.name


def base_after(
    alias: OutputAlias,
    outputs: Sequence[str],
    inputs: Sequence[InputDescriptor],
    value_of: Callable[[InputDescriptor], torch.Tensor],
    builder: TraceBuilder,
) -> torch.Tensor | None:
    """The base of ``alias`` with what forward wrote into it; None: the trace does not have it.

    Args:
        outputs: the names of the user outputs, by number.
        value_of: gives an input as it is before forward.
    """
    if alias.kind is None:
        name = outputs[int(alias.key)]
    else:
        wanted = alias.key
        base = next((d for d in inputs if wanted in (d.position, d.target)), None)
        if base is None:
            return None
        name = state_name(title(base))
        if name not in builder.results:
            return value_of(base)
    number = builder.results.get(name)
    return None if number is None else builder.steps[number].value
