"""Choose between the kernels for one matrix product, by measurement on this machine.

PyTorch has two libraries for float32 products on x86: MKL, behind ``torch.mm``, and oneDNN, behind
``mkldnn._linear_pointwise``. The faster one depends on the processor and on the shape. On some
processors oneDNN is more than twice as fast for all shapes, on others only for few rows.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from tvmbridge.core.decisions import Rule, decided
from tvmbridge.kernels.matmul import (
    ONEDNN_MATMUL,
    Operand,
    View,
    matmul_spec,
    onednn_program,
    program,
)
from tvmbridge.kernels.packed import MKL, ONEDNN, WeightPacking
from tvmbridge.kernels.product_form import form_of
from tvmbridge.kernels.table import choice

# A kernel replaces the usual one only if its time is at most this fraction: smaller differences are
# measurement error.
GAIN = 0.97
# Short candidates are repeated more often: each of a few short runs may have been interrupted.
_REPEATS, _MOST_REPEATS = 4, 40
ENOUGH_SECONDS, _MOST_SECONDS = 0.03, 0.15
# A candidate that leads by this factor is not overtaken: fewer repetitions decide, in a part of the
# seconds that are otherwise enough.
_CLEAR_LEAD, _REPEATS_IF_CLEAR, _PART_IF_CLEAR = 1.5, 2, 0.25
# Smaller products (in multiplications) take microseconds by any kernel; measuring takes
# milliseconds.
_WORTH_MEASURING = 1 << 17
# At most this many rows are compared with the product in float64.
_MOST_ROWS = 32
# The numbers that are drawn for an operand.
_BLOCK = (1 << 18) - 5
_ATEN, _ONEDNN = _LIBRARIES = ("aten", "onednn")


def faster_with_onednn(
    left: Operand, right: Operand, result: tuple[int, ...], biased: bool
) -> bool:
    """Whether oneDNN's kernel is clearly faster than MKL's for a float32 product.

    Args:
        left: the shape of the first operand in memory, and its view as a matrix.
        result: the shape of the product. Batches are never measured and give False.
    """
    if len(result) != 2 or min(result) < 2 or not torch.backends.mkldnn.is_available():
        return False
    if prod(left[0]) * result[1] < _WORTH_MEASURING:
        return False
    form = form_of(left, right, result)
    if form is not None:  # operands of equal layout share one measurement
        left, right = form.operands
    question = f"float32 product {left} {right}{' biased' * biased}"
    measure = functools.partial(_faster_library, left, right, result, biased)
    found = choice(question, _LIBRARIES, measure)
    return found == _ONEDNN


def _faster_library(left: Operand, right: Operand, result: tuple[int, ...], biased: bool) -> str:
    shapes = [left[0], right[0], *([(result[1],)] if biased else [])]
    operands = operands_to_measure(shapes, torch.float32)
    spec = matmul_spec((left[1], right[1]), result)
    out = torch.empty(result, dtype=torch.float32, device="cpu")
    library, onednn = program(spec), onednn_program(spec)
    with torch.no_grad():
        try:
            other = onednn(*operands)
        except RuntimeError:
            return _ATEN
        library(*operands, out)
        if not as_precise(other, out, exactly(left, right, operands)):
            return _ATEN
        first, second = race([lambda: library(*operands, out), lambda: onednn(*operands)])
    return _ONEDNN if second < GAIN * first else _ATEN


def library_product(
    left: Operand, right: Operand, result: tuple[int, ...], a: torch.Tensor, b: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a function that multiplies ``a`` by ``b`` with the library chosen for the product."""
    spec = matmul_spec((left[1], right[1]), result)
    if a.dtype is torch.float32 and faster_with_onednn(left, right, result, False):
        onednn = onednn_program(spec)
        return lambda: onednn(a, b)
    return written(program(spec), a, b, result)


def written(
    multiply: Callable[..., None], a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    """Return a function that calls ``multiply(a, b, out)`` on one ``out`` of ``shape``."""
    out = torch.empty(shape, dtype=a.dtype, device="cpu")

    def run() -> torch.Tensor:
        multiply(a, b, out)
        return out

    return run


def exactly(left: Operand, right: Operand, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the product's first rows, or matrices, in float64, plus any further operands."""
    (a, b), rest = operands[:2], operands[2:]
    a, b = (_viewed(t, o[1]) for t, o in ((a, left), (b, right)))
    first = a[:_MOST_ROWS].double() @ (b if b.dim() == 2 else b[:_MOST_ROWS]).double()
    return sum((r.double() for r in rest), first)


def _viewed(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return tensor if view is None else tensor.as_strided(*view)


def as_precise(
    found: torch.Tensor, usual: torch.Tensor, exact: torch.Tensor, times: float = 8
) -> bool:
    """Whether the error of ``found`` is at most ``times`` the error of the ``usual`` result.

    Libraries add in different orders and so differ by a few rounding errors. A kernel that rounds
    its operands to fewer digits has an error a thousand times as large.

    Args:
        exact: the first rows of the result in float64.
    """
    rows = exact.shape[0]
    errors = [(r[:rows].double() - exact).abs().max() for r in (found, usual)]
    rounding = torch.finfo(usual.dtype).eps * exact.abs().max()
    return bool(errors[0] <= times * torch.maximum(errors[1], rounding))


def operands_to_measure(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return random tensors of ``shapes``; PyTorch's global generator is not used or changed.

    Large tensors repeat a block of random numbers, since drawing takes longer than a product.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        count = prod(shape)
        block = torch.rand(min(count, _BLOCK), dtype=dtype, generator=generator, device="cpu")
        return block.repeat(-(-count // _BLOCK))[:count].view(shape)

    return [drawn(shape) for shape in shapes]


def race(candidates: Sequence[Callable[[], Any]], enough: float = ENOUGH_SECONDS) -> list[float]:
    """Run the candidates in turns, and return the shortest time of each in seconds.

    Args:
        enough: stop after so many seconds, if each candidate has run a few times.
    """
    best = [float("inf")] * len(candidates)
    started = time.perf_counter()
    for number in range(_MOST_REPEATS):
        for i, candidate in enumerate(candidates):
            start = time.perf_counter()
            candidate()
            best[i] = min(best[i], time.perf_counter() - start)
        elapsed = time.perf_counter() - started
        if elapsed > (enough if number + 1 >= _REPEATS else _MOST_SECONDS):
            break
        clear = number + 1 >= _REPEATS_IF_CLEAR and elapsed > _PART_IF_CLEAR * enough
        if clear and _has_clear_lead(best):
            break
    return best


def _has_clear_lead(seconds: Sequence[float]) -> bool:
    first, *others = sorted(seconds)
    return not others or others[0] > _CLEAR_LEAD * first


def product_kernel(measure: bool, dtype: str, spec: str, shapes: Sequence[Any]) -> str:
    """Return the name of oneDNN's kernel if it is faster for a product, else ""."""
    if not measure or dtype != "float32":
        return ""
    content = json.loads(spec)
    views = [None if v is None else (tuple(v[0]), tuple(v[1])) for v in content["views"]]
    left, right = ((tuple(s), v) for s, v in zip(shapes[:2], views, strict=True))
    result = tuple(content["result"])
    biased = len(shapes) > 2
    fast = decided(Rule.MIDDLE, lambda: faster_with_onednn(left, right, result, biased))
    return ONEDNN_MATMUL if fast else ""


def packing_of(rows: int, depth: int, columns: int, transposed: bool, measure: bool) -> str:
    """Return the library whose layout a frozen float32 weight is packed in; "" for no packing.

    Args:
        transposed: whether the weight is in memory as (columns, depth).
        measure: whether candidates may be measured; otherwise nothing is packed.
    """
    if not measure or min(rows, depth, columns) < 2:
        return ""
    question = f"packed float32 product {rows}x{depth}x{columns}{' transposed' * transposed}"
    libraries = (*([ONEDNN] * torch.backends.mkldnn.is_available()), MKL)
    if not torch.backends.mkl.is_available():
        libraries = libraries[:-1]
    return choice(
        question,
        ("", *libraries),
        functools.partial(_fastest_packing, rows, depth, columns, transposed, libraries),
    )


def _fastest_packing(
    rows: int, depth: int, columns: int, transposed: bool, libraries: Sequence[str]
) -> str:
    shape = (columns, depth) if transposed else (depth, columns)
    x, weight = operands_to_measure([(rows, depth), shape], torch.float32)
    x, weight = x - 0.5, weight - 0.5
    right: Operand = (shape, ((depth, columns), (1, depth)) if transposed else None)
    spec = matmul_spec((None, right[1]), (rows, columns))
    usual, out = program(spec), torch.empty(rows, columns, device="cpu")
    names, candidates = [""], list[Callable[[], Any]]([lambda: usual(x, weight, out)])
    if faster_with_onednn(((rows, depth), None), right, (rows, columns), False):
        onednn = onednn_program(spec)
        candidates = [lambda: onednn(x, weight)]
    with torch.no_grad():
        usual(x, weight, out)
        exact = x[:_MOST_ROWS].double() @ _viewed(weight, right[1]).double()
        for library in libraries:
            try:
                packed = WeightPacking(library, rows, transposed).pack(weight)
                found = packed.run(x, None, "none", "")
            except RuntimeError:
                continue
            if as_precise(found, out, exact):
                names.append(library)
                candidates.append(functools.partial(packed.run, x, None, "none", ""))
        seconds = race(candidates)
    return names[min(range(len(names)), key=seconds.__getitem__)]
