"""Operators that OpInfo reaches by none of its samples: overloads that take a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.testing._internal.opinfo.core import SampleInput

aten = torch.ops.aten

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Extra:
    """An operator with the attributes of OpInfo that a run reads.

    ``calls`` are the arguments of each sample behind its first tensor.
    """

    name: str
    variant_test_name: str
    op: Callable[..., Any]
    dtypes: frozenset[torch.dtype]
    calls: Sequence[Arguments]
    gradient: bool = False

    @property
    def supports_autograd(self) -> bool:
        """Whether its gradient is checked."""
        return self.gradient

    def supported_dtypes(self, device: str) -> frozenset[torch.dtype]:
        """The dtypes of its first tensor."""
        return self.dtypes

    def supported_backward_dtypes(self, device: str) -> frozenset[torch.dtype]:
        """The dtypes in which it has a gradient."""
        return self.dtypes & _FLOATS

    def sample_inputs(
        self, device: str, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[SampleInput]:
        """A sample for each call and each of several shapes, the empty one among them."""
        for shape in ((5, 7), (), (3, 0)):
            for args, kwargs in self.calls:
                x = torch.testing.make_tensor(shape, dtype=dtype, device=device)
                yield SampleInput(x.requires_grad_(requires_grad), args=args, kwargs=kwargs)


def _bitwise(name: str) -> Extra:
    numbers = [((n,), {}) for n in (5, -3, 0, 127)]
    operator = getattr(aten, f"bitwise_{name}").Scalar
    return Extra(f"bitwise_{name}", "scalar", operator, _INTEGERS, numbers)


def _roundings() -> list[Arguments]:
    modes = ("trunc", "floor", None)
    return [((n,), {"rounding_mode": m}) for m in modes for n in (3, 2.5, -0.7)]


_DIVISORS: list[Arguments] = [((n,), {}) for n in (3, 2.5, -0.7, 1e-40)]


def _largest(x: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
    return torch.topk(x, k, **options)[0]


def _sorted(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.sort(x, **options)[0]


def _number_to_the(x: torch.Tensor, base: float) -> torch.Tensor:
    return torch.pow(base, x)


def _with_a_number(x: torch.Tensor, dim: int, value: float) -> torch.Tensor:
    index = torch.arange(x.numel()).reshape(x.shape) // 2 % (x.shape[dim] if x.dim() else 1)
    return x.scatter(dim, index, value)


def _folded(x: torch.Tensor, **options: Any) -> torch.Tensor:
    columns = x.reshape(-1)[: x.numel() // 4 * 4].reshape(4, -1)
    return functional.fold(columns, (columns.shape[1] + 1, 2), (2, 2), **options)


_ORDERS: list[Arguments] = [
    ((), {"dim": dim, "descending": down, "stable": stable})
    for dim in (0, -1)
    for down in (False, True)
    for stable in (False, True)
]
_COUNTS: list[Arguments] = [
    ((1,), {"dim": 0}),
    ((1,), {"dim": -1, "largest": False}),
]

EXTRAS: tuple[Extra, ...] = (
    *(_bitwise(name) for name in ("and", "or", "xor")),
    Extra("div", "scalar_mode", aten.div.Scalar_mode, _FLOATS | _INTEGERS, _roundings()),
    Extra("fmod", "scalar", aten.fmod.Scalar, _FLOATS | _INTEGERS, _DIVISORS),
    Extra("nn.functional.fold", "", _folded, _FLOATS, [((), {})], gradient=True),
    Extra(
        "pow",
        "number",
        torch.pow,
        _FLOATS,
        [((n,), {}) for n in (2.5, -0.7, 0, 4)],
        gradient=True,
    ),
    Extra(
        "pow",
        "scalar",
        _number_to_the,
        _FLOATS,
        [((n,), {}) for n in (2, 0.7, 1.0, 0)],
        gradient=True,
    ),
    Extra(
        "scatter",
        "value",
        _with_a_number,
        _FLOATS | _INTEGERS,
        [((0, 3), {}), ((-1, 2.5), {})],
        gradient=True,
    ),
    Extra("sort", "values", _sorted, _FLOATS | _INTEGERS, _ORDERS, gradient=True),
    Extra("topk", "values", _largest, _FLOATS | _INTEGERS, _COUNTS, gradient=True),
)
