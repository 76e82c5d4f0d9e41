"""The arguments of an ATen call, by their names in the operator's schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax
from tvm.ir import Call, Expr

from tvmbridge.kernels.aten_call import resolve_overload


@dataclass(frozen=True)
class ComplexTensor:
    """A complex tensor: ``tensor`` has pairs of real numbers in its last dimension."""

    tensor: Expr


@dataclass(frozen=True)
class Arguments:
    """The arguments of an ATen call.

    - ``op``: the name of the operator.
    - ``values``: the arguments by name; tensors are Relax expressions. Images with channels last
      are not permuted.
    - ``results``: the indices of the operator's results that the call returns; None if the
      operator has only one result.
    """

    op: str
    values: dict[str, Any]
    results: tuple[int, ...] | None = None

    @classmethod
    def of(cls, content: dict[str, Any], tensors: Sequence[Expr]) -> Arguments:
        """Return the arguments in the content of a call's spec, with the schema's defaults."""
        schema = resolve_overload(content["op"])._schema.arguments
        values = {a.name: a.default_value for a in schema if a.has_default_value()}
        names = [a.name for a in schema]
        values |= {n: _filled(v, tensors) for n, v in zip(names, content["args"], strict=False)}
        values |= {n: _filled(v, tensors) for n, v in content["kwargs"].items()}
        results = content.get("results")
        return cls(content["op"], values, None if results is None else tuple(results))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


Compile: TypeAlias = Callable[[relax.BlockBuilder, Call, Arguments], Expr]


def has_complex(value: Any) -> bool:
    """Whether an argument is complex, or names a complex dtype; or one within a container."""
    if isinstance(value, dict):
        return any(map(has_complex, value.values()))
    if isinstance(value, list):
        return any(map(has_complex, value))
    return isinstance(value, ComplexTensor | complex) or (
        isinstance(value, str) and value.startswith("complex")
    )


def _filled(value: Any, tensors: Sequence[Expr]) -> Any:
    if isinstance(value, list):
        return [_filled(v, tensors) for v in value]
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        if tag in ("tensor", "channels_last"):
            return tensors[content]
        if tag == "complex":
            return ComplexTensor(tensors[content])
        numbers = {"float": float, "number": complex}
        return numbers[tag](content) if tag in numbers else content
    return value
