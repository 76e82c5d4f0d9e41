"""Whether products with a common left operand are faster as one, measured on this machine.

In training a linear layer is three products: forward, the gradient of its input and that of its
weight. Each is measured for a group of layers with one input, apart and combined. Concatenating the
cotangents is not counted: TVM writes them to one place instead of several. Adding up the inputs'
gradients is, and so is taking the weights' gradients apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tvmbridge.kernels.choice import library_product, operands_to_measure, race
from tvmbridge.kernels.matmul import Operand
from tvmbridge.kernels.table import choice

# Only a clear gain pays for moving weights.
_GAIN = 0.05
KINDS = ("forward", "input", "weight")
_YES, _NO = _ANSWERS = ("together", "apart")


@dataclass(frozen=True)
class Layers:
    """Linear layers with one input: ``(rows, depth) @ (depth, width)`` for each of ``widths``."""

    rows: int
    depth: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    threads: int


@functools.lru_cache(maxsize=1024)
def seconds(layers: Layers, kind: str) -> tuple[float, float]:
    """The best time of the products of one of :data:`KINDS`, apart and combined."""
    together = (sum(layers.widths),)
    with torch.no_grad():
        apart, combined = race([_step(layers, kind, w) for w in (layers.widths, together)])
    return apart, combined


def worthwhile(layers: Layers) -> bool:
    """Whether a training step is clearly faster with combined products."""
    return choice(f"all of {layers}", _ANSWERS, partial(_in_all, layers)) == _YES


def _in_all(layers: Layers) -> str:
    apart, gained = 0.0, 0.0
    for kind in KINDS:
        separate, combined = seconds(layers, kind)
        apart += separate
        # The backward products can stay apart, but not where forward's are.
        gained += separate - combined if kind == "forward" else max(0.0, separate - combined)
    return _answer(gained > _GAIN * apart)


def faster(layers: Layers, kind: str) -> bool:
    """Whether the products of one of :data:`KINDS` are faster combined."""
    return choice(f"{kind} of {layers}", _ANSWERS, partial(_of_kind, layers, kind)) == _YES


def _of_kind(layers: Layers, kind: str) -> str:
    separate, combined = seconds(layers, kind)
    return _answer(combined < separate)


def _answer(yes: bool) -> str:
    return _YES if yes else _NO


def _step(layers: Layers, kind: str, widths: Sequence[int]) -> Callable[[], object]:
    """The products of ``kind`` for layers of ``widths``, with what comes after them."""
    rows, depth, dtype = layers.rows, layers.depth, layers.dtype
    x: Operand = ((rows, depth), None)
    products = []
    for n in widths:
        if kind == "forward":
            products.append(_product(x, ((n, depth), ((depth, n), (1, depth))), (rows, n), dtype))
        elif kind == "input":
            products.append(_product(((rows, n), None), ((n, depth), None), (rows, depth), dtype))
        else:
            cotangent: Operand = ((rows, n), ((n, rows), (1, n)))
            products.append(_product(cotangent, x, (n, depth), dtype))
    apart = len(widths) > 1

    def step() -> None:
        results = [product() for product in products]
        if kind == "input" and apart:
            for other in results[1:]:
                results[0].add_(other)
        elif kind == "weight" and not apart:
            for part in results[0].split(list(layers.widths)):
                part.clone()

    return step


def _product(
    left: Operand, right: Operand, result: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """A product by the kernel that it would be given."""
    a, b = operands_to_measure((left[0], right[0]), dtype)
    return library_product(left, right, result, a, b)
