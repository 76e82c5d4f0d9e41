"""Helpers of all benchmarks: timing in turns, and tables with bounds."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tvmbridge.core.compiled_half import FOLDER, halves_folder


@dataclass(frozen=True)
class Row:
    """One figure with its unit, and the upper bound that it must keep (None: no bound)."""

    name: str
    value: float
    unit: str = ""
    bound: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the figure is within its bound; NaN is within no bound."""
        return self.bound is None or self.value <= self.bound


def caches_in(folder: str) -> dict[str, str]:
    """Return environment variables by which a process has its caches in ``folder``.

    The C++ halves, which an installation has, stay in their own folder.
    """
    return {
        "TVMBRIDGE_CACHE_DIR": f"{folder}/tvm",
        FOLDER: str(halves_folder()),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the arguments that all benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--no-check", action="store_true", help="print only, whatever the bounds")
    # torch.export warns about its own modules, in the middle of the table.
    warnings.simplefilter("ignore", FutureWarning)
    return made


def report(title: str, rows: Sequence[Row], *, check: bool) -> int:
    """Print a table; return the exit status: 1 if a bound does not hold and ``check`` is set."""
    table = Table("", "measured", "bound", "", title=title)
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound:g} {row.unit}"
        verdict = "" if row.bound is None else ("[green]✓[/]" if row.holds else "[red]✗[/]")
        table.add_row(row.name, f"{row.value:.3g} {row.unit}", bound, verdict)
    Console().print(table)
    return int(check and not all(row.holds for row in rows))


def in_turns(
    functions: Sequence[Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Call the functions in turns, and return the seconds of each function's calls."""
    seconds: list[list[float]] = [[] for _ in functions]
    for number in range(warmup + rounds):
        for function, record in zip(functions, seconds, strict=True):
            start = clock()
            function()
            elapsed = clock() - start
            if number >= warmup:
                record.append(elapsed)
    return seconds


def alternate(
    functions: Sequence[Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Call the functions in turns, and return the median seconds of each."""
    seconds = in_turns(functions, rounds=rounds, warmup=warmup, clock=clock)
    return [statistics.median(each) for each in seconds]
