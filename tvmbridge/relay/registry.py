"""The table of converters: from an ATen overload to a function that writes Relay for it.

The Relay must have ATen's meaning. A converter has the signature
``convert(ctx, node, *args, **kwargs)``, with the node's arguments (fx nodes and Python values). It
returns the text of its result, or a tuple of texts if the operator has several results; None stands
for a result that it does not compute. It raises :class:`Refused` if Relay cannot say the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tvmbridge.core.torch_private import OpOverload
from tvmbridge.frontend.registry import FLOATS as FLOATS
from tvmbridge.frontend.registry import ConverterFn as ConverterFn
from tvmbridge.frontend.registry import enter

INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
NUMBERS = FLOATS | INTEGERS
COMPLEX = frozenset({torch.complex64, torch.complex128})
ALL = NUMBERS | {torch.bool}


class Refused(Exception):
    """Raised by a converter that cannot write an operator; the text gives the reason."""


@dataclass(frozen=True)
class RelayConverter:
    """A converter in the table.

    - ``function``: the converter.
    - ``dtypes``: the dtypes that it converts, of all tensors that the operator reads or returns.
    """

    function: ConverterFn
    dtypes: frozenset[torch.dtype]


CONVERTERS: dict[OpOverload, RelayConverter] = {}


def converts(
    *overloads: OpOverload, dtypes: frozenset[torch.dtype] = ALL
) -> Callable[[ConverterFn], ConverterFn]:
    """Register the decorated converter for ``overloads``."""

    def decorate(function: ConverterFn) -> ConverterFn:
        enter(CONVERTERS, overloads, RelayConverter(function, dtypes))
        return function

    return decorate
