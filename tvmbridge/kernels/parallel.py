"""Measure whether linear layers with a common input are faster combined into one product.

In training a linear layer has three products: forward, the gradient of the input and the gradient
of the weight. Each kind is measured for a group of layers, separate and combined. The time to
concatenate cotangents is not counted, because TVM writes them to one place from the start. The time
to sum input gradients and the time to split weight gradients are counted.
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

# Combining copies weights, which only a clear gain pays for.
_GAIN = 0.05
KINDS = ("forward", "input", "weight")
_YES, _NO = _ANSWERS = ("together", "apart")


@dataclass(frozen=True)
class Layers:
    """Linear layers with a common input: ``(rows, depth) @ (depth, width)`` for each width.

    - ``dtype``: the dtype of all operands.
    - ``threads``: PyTorch's number of threads.
    """

    rows: int
    depth: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    threads: int


@functools.lru_cache(maxsize=1024)
def seconds(layers: Layers, kind: str) -> tuple[float, float]:
    """Return the shortest times of one kind of products for separate and for combined layers.

    ``kind``: one of :data:`KINDS`: forward, the gradient of the input, or that of the weight.
    """
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
        # With a combined forward, each kind of backward product can still stay separate.
        gained += separate - combined if kind == "forward" else max(0.0, separate - combined)
    return _answer(gained > _GAIN * apart)


def faster(layers: Layers, kind: str) -> bool:
    """Whether one kind of products, one of :data:`KINDS`, is faster for combined layers."""
    return choice(f"{kind} of {layers}", _ANSWERS, partial(_of_kind, layers, kind)) == _YES


def _of_kind(layers: Layers, kind: str) -> str:
    separate, combined = seconds(layers, kind)
    return _answer(combined < separate)


def _answer(yes: bool) -> str:
    return _YES if yes else _NO


def _step(layers: Layers, kind: str, widths: Sequence[int]) -> Callable[[], object]:
    """Return a function that runs the products of ``kind`` for layers of ``widths``.

    It includes the sum of input gradients of separate layers, or the split of combined weight
    gradients.
    """
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
    """Return a function that computes a product by the kernel that compilation would choose."""
    a, b = operands_to_measure((left[0], right[0]), dtype)
    return library_product(left, right, result, a, b)
