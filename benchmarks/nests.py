"""Operators as generated loop nests, against PyTorch's kernels called from compiled code.

    python -m benchmarks.nests [name ...]

Each function is compiled with the operator's converter and without it, and both run in turns. The
frontend's size limits for loop nests are lifted. Times are medians in microseconds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import tvmbridge
from benchmarks.common import alternate
from tvmbridge.core.admission import recorded_uses
from tvmbridge.frontend import compiled, nests
from tvmbridge.frontend.registry import CONVERTERS

aten = torch.ops.aten

_LIMITS = ("_MOST_WRITTEN", "_MOST_SORTED", "_MOST_CHOSEN", "FEW_CALLS")
_BEYOND = 1 << 40


@dataclass(frozen=True)
class Case:
    """A function with its inputs, and the operator whose converter is measured."""

    name: str
    operator: Any
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


@contextmanager
def _unlimited() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (nests, compiled):
            for name in _LIMITS:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, _BEYOND))
        yield


def _compile(case: Case, *, native: bool) -> nn.Module:
    module = _Module(case.function).eval()
    rest = {k: v for k, v in CONVERTERS.items() if native or k != case.operator}
    with (
        mock.patch.dict(CONVERTERS, rest, clear=True),
        _unlimited(),
        recorded_uses(everything=True),
    ):
        tvmbridge.add_tvm_dispatch(module, case.inputs)
    (specialization,) = tvmbridge.dispatch_report(module).specializations
    assert (str(case.operator) in specialization.native_operators) is native, case.name
    return module


def _reads(rows: int, columns: int) -> Iterator[Case]:
    x, size = torch.randn(rows, columns), f"{rows}x{columns}"
    places = torch.randint(rows, (rows, columns))
    row = torch.randint(rows, (rows,))
    yield Case(f"gather 0 {size}", aten.gather.default, lambda x, i: x.gather(0, i), (x, places))
    inner = places % columns
    yield Case(f"gather 1 {size}", aten.gather.default, lambda x, i: x.gather(1, i), (x, inner))
    yield Case(
        f"index_select {size}",
        aten.index_select.default,
        lambda x, i: x.index_select(0, i),
        (x, row),
    )
    yield Case(f"index {size}", aten.index.Tensor, lambda x, i: x[i], (x, row))
    yield Case(
        f"slice_scatter {size}",
        aten.slice_scatter.default,
        lambda x, y: x.slice_scatter(y, 0, 1, rows - 1),
        (x, x[: rows - 2] * 2),
    )


def _writes(rows: int, columns: int) -> Iterator[Case]:
    x, size = torch.randn(rows, columns), f"{rows}x{columns}"
    places = torch.randint(rows, (rows, columns))
    row = torch.randint(rows, (rows,))
    yield Case(f"cumsum 0 {size}", aten.cumsum.default, lambda x: x.cumsum(0), (x,))
    yield Case(f"cumsum 1 {size}", aten.cumsum.default, lambda x: x.cumsum(1), (x,))
    yield Case(
        f"scatter {size}", aten.scatter.src, lambda x, i: x.scatter(0, i, x * 2), (x, places)
    )
    yield Case(
        f"scatter_add {size}",
        aten.scatter_add.default,
        lambda x, i: x.scatter_add(0, i, x),
        (x, places),
    )
    yield Case(
        f"index_put {size}",
        aten.index_put.default,
        lambda x, i: x.index_put((i,), x, accumulate=True),
        (x, row),
    )
    yield Case(f"sort {size}", aten.sort.stable, lambda x: x.sort(dim=-1, stable=True), (x,))
    yield Case(f"topk {size}", aten.topk.default, lambda x: x.topk(2)[0], (x,))
    yield Case(f"histc {size}", aten.histc.default, lambda x: x.histc(64, -2, 2), (x,))
    yield Case(
        f"cdist {size}", aten._cdist_forward.default, lambda x: torch.cdist(x[:16], x[:16]), (x,)
    )
    yield Case(f"pow {size}", aten.pow.Tensor_Tensor, lambda x: x.abs() ** x, (x,))


def _cases() -> Iterator[Case]:
    for rows, columns in ((8, 16), (64, 64), (256, 256), (1024, 1024)):
        yield from _reads(rows, columns)
        yield from _writes(rows, columns)
    columns = torch.randn(4, 64 * 9, 14 * 14)
    yield Case(
        "fold 4x64x14x14",
        aten.col2im.default,
        lambda x: nn.functional.fold(x, (14, 14), (3, 3), padding=1),
        (columns,),
    )


def main(names: Sequence[str]) -> None:
    """Print a line for each case whose name contains one of ``names``; all if there are none."""
    warnings.simplefilter("ignore")
    print(f"{'case':28} {'ATen us':>9} {'ours us':>9} {'ratio':>6}")
    for case in _cases():
        if names and not any(name in case.name for name in names):
            continue
        called, native = (_compile(case, native=n) for n in (False, True))
        with torch.no_grad():
            runs = [lambda m=m, c=case: m(*c.inputs) for m in (called, native)]
            theirs, ours = (1e6 * t for t in alternate(runs, rounds=100))
        print(f"{case.name:28} {theirs:9.1f} {ours:9.1f} {ours / theirs:6.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
