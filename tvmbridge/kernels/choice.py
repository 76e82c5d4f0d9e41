"""The choice between kernels for one matrix product, measured on this machine.

PyTorch carries two libraries for float32 products on x86: MKL, behind ``torch.mm``, and oneDNN,
behind ``mkldnn._linear_pointwise``. Which is faster depends on the processor and on the shape: on
some processors oneDNN is more than twice as fast throughout, on others only where rows are few.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tvmbridge.core.decisions import Rule, decided
from tvmbridge.kernels.matmul import ONEDNN_MATMUL, View, matmul_spec, onednn_program, program

# oneDNN's kernel allocates its result; only a clear gain pays for that.
_GAIN = 0.9
_REPEATS = 4
_MOST_SECONDS = 0.15

Operand = tuple[tuple[int, ...], View]


@functools.lru_cache(maxsize=4096)
def faster_with_onednn(
    left: Operand, right: Operand, result: tuple[int, ...], biased: bool, threads: int
) -> bool:
    """Whether oneDNN's kernel is clearly faster for this float32 product than MKL's.

    Args:
        left: shape of the first operand in memory, and its view as a matrix.
        right: the same of the second.
        result: shape of the product; only two dimensions are measured.
        biased: whether a row is added.
        threads: PyTorch's threads, on which the answer depends.
    """
    if len(result) != 2 or min(result) < 2 or not torch.backends.mkldnn.is_available():
        return False
    shapes = [left[0], right[0], *([(result[1],)] if biased else [])]
    operands = operands_to_measure(shapes, torch.float32)
    spec = matmul_spec((left[1], right[1]), result)
    out = torch.empty(result, dtype=torch.float32)
    library, onednn = program(spec), onednn_program(spec)
    with torch.no_grad():
        try:
            other = onednn(*operands)
        except RuntimeError:
            return False
        library(*operands, out)
        if not torch.allclose(out, other, rtol=1e-4, atol=1e-4):
            return False
        first, second = race([lambda: library(*operands, out), lambda: onednn(*operands)])
    return second < _GAIN * first


def operands_to_measure(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Random tensors, by a generator of their own: the user's draws must not depend on us."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, dtype=dtype, generator=generator) for shape in shapes]


def race(candidates: Sequence[Callable[[], Any]]) -> list[float]:
    """The best time of each candidate, run in turns."""
    best = [float("inf")] * len(candidates)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        for i, candidate in enumerate(candidates):
            start = time.perf_counter()
            candidate()
            best[i] = min(best[i], time.perf_counter() - start)
        if time.perf_counter() - started > _MOST_SECONDS:
            break
    return best


def product_kernel(measure: bool, dtype: str, spec: str, shapes: Sequence[Any]) -> str:
    """The kernel for a product: oneDNN's name where it was measured to be faster, else ""."""
    if not measure or dtype != "float32":
        return ""
    content = json.loads(spec)
    views = [None if v is None else (tuple(v[0]), tuple(v[1])) for v in content["views"]]
    left, right = ((tuple(s), v) for s, v in zip(shapes[:2], views, strict=True))
    result = tuple(content["result"])
    threads, biased = torch.get_num_threads(), len(shapes) > 2
    fast = decided(Rule.MIDDLE, lambda: faster_with_onednn(left, right, result, biased, threads))
    return ONEDNN_MATMUL if fast else ""
