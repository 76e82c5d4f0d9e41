"""The table of converters: from an ATen overload to a function that emits Relax for it.

The Relax must have exactly ATen's meaning. A converter has the signature
``convert(ctx, node, *args, **kwargs)``, with the node's arguments (fx nodes and Python values). It
returns a Relax expression, or a tuple of them if the operator has several results. It raises
:class:`Declined` if the Relax would not be exact; the operator then becomes an ATen call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tvmbridge.core.torch_private import OpOverload

FLOATS = frozenset({torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
NUMBERS = FLOATS | {torch.int32, torch.int64}
COMPUTED = NUMBERS | {torch.bool}
MOVED = COMPUTED | HALVES | {torch.int8, torch.uint8, torch.int16}

ConverterFn = Callable[..., Any]
Entry = TypeVar("Entry")


class Declined(Exception):
    """Raised by a converter that declines an operator's arguments; the text says why."""


@dataclass(frozen=True)
class Converter:
    """A converter in the table.

    - ``function``: the converter.
    - ``dtypes``: the dtypes that it converts, of all tensors that the operator reads or returns.
    - ``widens``: whether ``widening.py`` gives it half precision as float32, because it does not
      know half precision itself.
    """

    function: ConverterFn
    dtypes: frozenset[torch.dtype]
    widens: bool = False


CONVERTERS: dict[OpOverload, Converter] = {}


def enter(
    table: dict[OpOverload, Entry], overloads: Sequence[OpOverload], converter: Entry
) -> None:
    """Enter the converter of ``overloads`` into a table.

    Raises:
        ValueError: an overload has one already.
    """
    for overload in overloads:
        if overload in table:
            raise ValueError(f"{overload} has two converters")
        table[overload] = converter


def converts(
    *overloads: OpOverload, dtypes: frozenset[torch.dtype] = COMPUTED, widens: bool = True
) -> Callable[[ConverterFn], ConverterFn]:
    """Register the decorated converter for ``overloads``.

    Args:
        *overloads: the ATen overloads that it converts.
        dtypes: the dtypes that the converter knows.
        widens: whether half precision is computed by this converter in float32, unless it knows
            half precision itself.
    """
    widened = widens and torch.float32 in dtypes and not HALVES & dtypes
    claimed = dtypes | HALVES if widened else dtypes

    def decorate(function: ConverterFn) -> ConverterFn:
        enter(CONVERTERS, overloads, Converter(function, claimed, widened))
        return function

    return decorate
