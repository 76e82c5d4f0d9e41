"""The converter table: ATen overload -> function that emits Relax with exactly ATen's meaning.

A converter is written as ``def convert(ctx, node, *args, **kwargs)`` with the node's own arguments
(fx nodes and Python values) and returns a Relax expression, or a tuple of them for an operator
with several results. It raises :class:`Declined` where it would not be exact; the operator then
becomes an ATen call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import OpOverload

FLOATS = frozenset({torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
NUMBERS = FLOATS | {torch.int32, torch.int64}
COMPUTED = NUMBERS | {torch.bool}
MOVED = COMPUTED | HALVES | {torch.int8, torch.uint8, torch.int16}

ConverterFn = Callable[..., Any]


class Declined(Exception):
    """A converter declines an operator's arguments; the text says why."""


@dataclass(frozen=True)
class Converter:
    """A converter and the dtypes (of all tensors it reads and makes) that it claims.

    ``widens``: it knows no half precision, which ``widening.py`` gives it as float32.
    """

    function: ConverterFn
    dtypes: frozenset[torch.dtype]
    widens: bool = False


CONVERTERS: dict[OpOverload, Converter] = {}


def converts(
    *overloads: OpOverload, dtypes: frozenset[torch.dtype] = COMPUTED, widens: bool = True
) -> Callable[[ConverterFn], ConverterFn]:
    """Enter the decorated converter into the table for ``overloads``.

    Args:
        dtypes: those that it knows.
        widens: it is also for half precision, as float32.
    """
    widened = widens and torch.float32 in dtypes and not HALVES & dtypes
    claimed = dtypes | HALVES if widened else dtypes

    def enter(function: ConverterFn) -> ConverterFn:
        for overload in overloads:
            if overload in CONVERTERS:
                raise ValueError(f"{overload} has two converters")
            CONVERTERS[overload] = Converter(function, claimed, widened)
        return function

    return enter
