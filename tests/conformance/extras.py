"""Overloads that take a number in place of a tensor, for which OpInfo has no samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.testing._internal.opinfo.core import SampleInput

from tests.conformance.like_opinfo import FLOATS, INTEGERS, LikeOpInfo

aten = torch.ops.aten


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Extra(LikeOpInfo):
    """An operator; ``calls`` has, for each sample, the arguments after the first tensor."""

    name: str
    variant_test_name: str
    op: Callable[..., Any]
    dtypes: frozenset[torch.dtype]
    calls: Sequence[Arguments]
    gradient: bool = False

    def sample_inputs(
        self, device: str, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[SampleInput]:
        """Yield a sample for each call and each of several shapes, one of which is empty."""
        for shape in ((5, 7), (), (3, 0)):
            for args, kwargs in self.calls:
                x = torch.testing.make_tensor(shape, dtype=dtype, device=device)
                yield SampleInput(x.requires_grad_(requires_grad), args=args, kwargs=kwargs)


def _bitwise(name: str) -> Extra:
    numbers = [((n,), {}) for n in (5, -3, 0, 127)]
    operator = getattr(aten, f"bitwise_{name}").Scalar
    return Extra(f"bitwise_{name}", "scalar", operator, INTEGERS, numbers)


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

_BOUNDS: list[Arguments] = [((-0.5, 0.7), {}), ((), {"min": 0.1}), ((), {"max": 0.3})]

EXTRAS: tuple[Extra, ...] = (
    *(_bitwise(name) for name in ("and", "or", "xor")),
    Extra("clamp", "number", torch.clamp, FLOATS, _BOUNDS, gradient=True),
    Extra("div", "scalar_mode", aten.div.Scalar_mode, FLOATS | INTEGERS, _roundings()),
    Extra("fmod", "scalar", aten.fmod.Scalar, FLOATS | INTEGERS, _DIVISORS),
    Extra("nn.functional.fold", "", _folded, FLOATS, [((), {})], gradient=True),
    Extra(
        "pow",
        "number",
        torch.pow,
        FLOATS,
        [((n,), {}) for n in (2.5, -0.7, 0, 4)],
        gradient=True,
    ),
    Extra(
        "pow",
        "scalar",
        _number_to_the,
        FLOATS,
        [((n,), {}) for n in (2, 0.7, 1.0, 0)],
        gradient=True,
    ),
    Extra(
        "scatter",
        "value",
        _with_a_number,
        FLOATS | INTEGERS,
        [((0, 3), {}), ((-1, 2.5), {})],
        gradient=True,
    ),
    Extra("sort", "values", _sorted, FLOATS | INTEGERS, _ORDERS, gradient=True),
    Extra("topk", "values", _largest, FLOATS | INTEGERS, _COUNTS, gradient=True),
)
