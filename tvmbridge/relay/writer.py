"""The writer has the lines of one Relay function, and emits calls for the converters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from tvmbridge.frontend.elementwise import Operand as Operand
from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.shapes import shape_of as shape_of
from tvmbridge.relay.literals import attribute_text, name_text, number_text, type_text
from tvmbridge.relay.registry import Refused

dtype_of = result_dtype


def axis_of(dim: int, rank: int) -> int:
    """Return ``dim`` counted from the front; a 0-d tensor has the dimension 0."""
    return dim % max(rank, 1)


@dataclass
class Writer:
    """The state of one text.

    - ``version``: the version of Relay that will parse it.
    - ``lines``: the expressions of ``%0``, ``%1``, ...
    - ``signature``: the types of the function's parameters, by name.
    - ``params``: the values of those parameters that are weights and constants.
    - ``values``: the text of each fx node, or a tuple of texts.
    - ``weights``: names and values of the module's tensors, declared where they are read first.
    - ``known``: the values of nodes that depend on no input of the graph.
    """

    version: str
    lines: list[str] = field(default_factory=list)
    signature: dict[str, str] = field(default_factory=dict)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    weights: dict[fx.Node, tuple[str, torch.Tensor]] = field(default_factory=dict)
    known: dict[fx.Node, Any] = field(default_factory=dict)

    def line(self, expression: str) -> str:
        """Bind ``expression`` to a new variable, and return the variable."""
        self.lines.append(expression)
        return f"%{len(self.lines) - 1}"

    def call(self, operator: str, *operands: str, **attributes: Any) -> str:
        """Emit a call of a Relay operator, and return its variable.

        Raises:
            Refused: this version of Relay has no such operator.
        """
        if operator in OPERATORS_ABSENT[self.version]:
            raise Refused(f"Relay {self.version} has no operator {operator}")
        if operator in ATTRIBUTES:
            attributes["attrs_type_key"] = f"relay.attrs.{ATTRIBUTES[operator]}"
        named = [f"{name}={attribute_text(value)}" for name, value in attributes.items()]
        return self.line(f"{operator}({', '.join([*operands, *named])})")

    def pack(self, operands: Sequence[str]) -> str:
        """Emit a tuple."""
        return self.line(f"({', '.join(operands)}{',' if len(operands) == 1 else ''})")

    def parameter(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Declare a parameter of the function, and return its variable."""
        unique = name_text(name, self.signature)
        self.signature[unique] = type_text(shape, dtype)
        return f"%{unique}"

    def weight(self, name: str, tensor: torch.Tensor) -> str:
        """Declare a parameter that has the values of ``tensor``, and return its variable."""
        variable = self.parameter(name, tuple(tensor.shape), tensor.dtype)
        self.params[variable.removeprefix("%")] = tensor
        return variable

    def constant(self, tensor: torch.Tensor) -> str:
        """Return a number, or declare a parameter for all other values."""
        text = None if tensor.dim() else number_text(tensor.item(), tensor.dtype)
        return self.weight("const_0", tensor) if text is None else text

    def value(self, node: fx.Node) -> str:
        """Return the text of a node's tensor."""
        if node not in self.values and node in self.weights:
            self.values[node] = self.weight(*self.weights[node])
        elif node not in self.values and node in self.known:
            self.values[node] = self.constant(self.known[node])
        text: str = self.values[node]
        return text

    def number(self, value: float, dtype: torch.dtype) -> str:
        """Return a number of a dtype.

        Raises:
            Refused: the number does not fit the dtype.
        """
        try:
            return self.constant(torch.tensor(value, dtype=dtype))
        except (OverflowError, RuntimeError, TypeError) as error:
            raise Refused(f"{value} does not fit {dtype}") from error

    def operand(self, operand: Operand, dtype: torch.dtype) -> str:
        """Return a node's text, or a number, cast to ``dtype``."""
        if not isinstance(operand, fx.Node):
            return self.number(operand, dtype)
        return self.cast(self.value(operand), dtype_of(operand), dtype)

    def cast(self, text: str, have: torch.dtype, want: torch.dtype) -> str:
        """Cast ``text`` from dtype ``have`` to ``want``, as ``Tensor.to(want)`` does."""
        if have == want:
            return text
        if want is torch.bool:
            return self.call("not_equal", text, self.number(0, have))
        return self.call("cast", text, dtype=want)

    def reshape(self, text: str, shape: Sequence[int]) -> str:
        """Reshape ``text`` in row-major order."""
        return self.call("reshape", text, newshape=list(shape))

    def transpose(self, text: str, axes: Sequence[int]) -> str:
        """Permute the dimensions of ``text``; nothing is emitted if the order stays."""
        if list(axes) == sorted(axes):
            return text
        return self.call("transpose", text, axes=list(axes))

    def broadcast(self, text: str, have: Sequence[int], want: Sequence[int]) -> str:
        """Broadcast ``text`` from one shape to another."""
        if tuple(have) == tuple(want):
            return text
        return self.call("broadcast_to", text, shape=list(want))


# Relay's parser does not know the attributes of these operators by itself.
ATTRIBUTES: Final = MappingProxyType(
    {
        "cumprod": "ScanopAttrs",
        "cumsum": "ScanopAttrs",
        "scatter": "ScatterAttrs",
        "scatter_add": "ScatterAddAttrs",
        "scatter_elements": "ScatterElementsAttrs",
        "scatter_nd": "ScatterNDAttrs",
    }
)

VERSIONS: Final = ("0.17", "0.14", "0.11")

# 0.12 replaced ``scatter`` and ``scatter_add`` by ``scatter_elements``.
OPERATORS_ABSENT: Final = MappingProxyType(
    {
        "0.17": frozenset({"scatter", "scatter_add"}),
        "0.14": frozenset({"scatter", "scatter_add"}),
        "0.11": frozenset({"scatter_elements"}),
    }
)
