"""``python -m benchmarks.bandwidth``: the memory bandwidth of compiled kernels, in GB/s.

Each kernel that TVM generated is timed within a call. Its bandwidth is the bytes of its arguments
and results, each counted once, over its time; it is compared with this machine's fastest copy.
PyTorch's kernels are left out, and so are matrix products, which are bound by arithmetic. A kernel
below 60% of a copy is marked, unless its data fits into a core's own cache.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import parser
from benchmarks.peers import step_of
from benchmarks.suites import SUITES
from tvmbridge import add_tvm_dispatch
from tvmbridge.compiler import executable

_LEAST = 0.6
_WARM, _CALLS = 5, 15
_NO_LOOPS = ("vm.", "tvmbridge.", "product")
# Bytes of a core's own cache: a smaller kernel is bound by its launch and not by memory.
_OWN_CACHE = 2**20


@dataclass
class Kernel:
    """The calls of one kernel: the bytes that a call moves, and the seconds of each call."""

    bytes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def share(self, copied: float) -> float:
        """Return the kernel's bandwidth over ``copied``, the bytes/s of a copy."""
        return self.bytes / self.median / copied


def _bytes(arguments: tuple[Any, ...]) -> int:
    tensors = [a for a in arguments if hasattr(a, "shape") and hasattr(a, "dtype")]
    return sum(prod(t.shape) * t.dtype.itemsize for t in tensors)


@contextmanager
def _timed(kernels: dict[tuple[str, int], Kernel]) -> Iterator[None]:
    """Time each kernel that compiled code calls inside this context, into ``kernels``."""

    @contextmanager
    def told(machine: Any, title: Callable[[str, Any], str | None]) -> Iterator[None]:
        begun = 0.0

        def tell(_: Any, symbol: str, before: bool, result: Any, *arguments: Any) -> int:
            nonlocal begun
            ended = time.perf_counter()
            if not before and not symbol.startswith(_NO_LOOPS):
                size = _bytes(arguments)
                name = title(symbol, arguments) or symbol
                kernels.setdefault((name, size), Kernel(size)).seconds.append(ended - begun)
            begun = time.perf_counter()
            return 0  # TVM continues with the call

        machine.set_instrument(tell)
        try:
            yield
        finally:
            machine.set_instrument(None)

    usual = executable.profiling, executable.kernels_told
    executable.profiling, executable.kernels_told = (lambda: True), told
    try:
        yield
    finally:
        executable.profiling, executable.kernels_told = usual


def measure(name: str) -> Mapping[tuple[str, int], Kernel]:
    """Return the kernels of one row of ``python -m benchmarks``, by name and bytes."""
    suite = SUITES[name]
    module, x = suite.module(), suite.sample()
    add_tvm_dispatch(module, x)
    step = step_of(module, x)
    for _ in range(_WARM):
        step()
    kernels: dict[tuple[str, int], Kernel] = {}
    with _timed(kernels):
        for _ in range(_CALLS):
            step()
    return kernels


def _copy_speed() -> float:
    """Return the bytes/s, read and written together, of the fastest copy beyond the caches."""
    source, target = torch.rand(2**25), torch.rand(2**25)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.nbytes / best


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", nargs="+", default=[""], help="rows whose names contain it")
    arguments.add_argument("--all", action="store_true", help="print fast kernels as well")
    options = arguments.parse_args()
    names = [n for n in SUITES if any(r in n for r in options.rows)]
    copied = _copy_speed()
    table = Table(title=f"kernels beside a copy of {copied / 1e9:.1f} GB/s")
    for column in ("row", "kernel", "calls", "KiB", "µs", "of a copy"):
        table.add_column(column, overflow="fold")
    slow = 0
    for name in names:
        torch._dynamo.reset()
        totals: dict[str, float] = defaultdict(float)
        found = sorted(measure(name).items(), key=lambda i: -sum(i[1].seconds))
        for (kernel, size), times in found:
            share = times.share(copied)
            bad = share < _LEAST and size > _OWN_CACHE
            slow += bad
            totals["slow" if bad else "rest"] += sum(times.seconds) / _CALLS
            if bad or options.all:
                table.add_row(
                    name,
                    kernel,
                    f"{len(times.seconds) / _CALLS:g}",
                    f"{size / 1024:.0f}",
                    f"{times.median * 1e6:.0f}",
                    f"[{'red' if bad else 'green'}]{share:.0%}[/]",
                )
        print(name, {k: f"{v * 1e3:.2f} ms" for k, v in totals.items()}, flush=True)
    Console().print(table)
    return int(bool(slow) and not options.no_check)


if __name__ == "__main__":
    sys.exit(main())
