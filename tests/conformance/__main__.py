"""The command ``python -m tests.conformance``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.admit import write_admitted
from tests.conformance.coverage import (
    every_operator,
    operators,
    operators_with_long_rows,
    special_operators,
)
from tests.conformance.document import write_document, write_results
from tests.conformance.quick import (
    QUICK_GRADIENTS,
    QUICK_LIMIT,
    QUICK_OPERATORS,
    QUICK_OTHERS,
    QUICK_STEP,
)
from tests.conformance.runner import Entry, Settings, run_entries
from tests.conformance.samples import DEVICE_VARIABLE, device
from tests.conformance.table import FAILURES, Table, describe, read_rows
from tests.processes import add_shard

_KNOWN = {
    "samples": operators,
    "special": special_operators,
    "accuracy": operators_with_long_rows,
}
MODES = ("forward", "auto", "relax", "aot")


def all_entries(
    names: Sequence[str], dtypes: Sequence[str], modes: Sequence[str] = ("forward",)
) -> list[Entry]:
    """Return an entry for each operator, dtype and mode that the operator supports."""
    return [
        Entry(name, dtype, mode)
        for mode in modes
        for dtype in dtypes
        for name in names
        if _has(every_operator()[name], getattr(torch, dtype), mode)
    ]


def _has(op: Any, dtype: torch.dtype, mode: str) -> bool:
    if mode == "forward":
        return dtype in op.supported_dtypes(device())
    return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(device())


def _named(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the full names that match the user's names; a name without variant matches all."""
    names = [n for w in wanted for n in known if w in (n, n.split(":")[0])]
    missing = [w for w in wanted if not any(w in (n, n.split(":")[0]) for n in known)]
    if missing:
        raise SystemExit(f"no such operators: {', '.join(missing)}")
    return names


def _quick_entries(size: str) -> list[Entry]:
    if size == "once":
        chosen = all_entries(QUICK_OPERATORS[::2], ["float32"])
        return chosen + all_entries(QUICK_GRADIENTS[1::2], ["float32"], ["relax"])
    chosen = all_entries(QUICK_OPERATORS, ["float32"])
    for first, dtype in enumerate(QUICK_OTHERS):
        chosen += all_entries(QUICK_OPERATORS[first::QUICK_STEP], [dtype])
    return chosen + all_entries(QUICK_GRADIENTS, ["float32"], ["relax", "aot"])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    add = parser.add_argument
    add(
        "--quick",
        nargs="?",
        const="whole",
        choices=["whole", "once"],
        help="the curated set, forward and gradients; once: every second, one dtype, few samples",
    )
    add("--ops", nargs="+", help="operators, by their name in OpInfo")
    add("--dtypes", nargs="+", default=["float32"], help="such as float32 int64")
    add("--modes", nargs="+", default=["forward"], choices=MODES, help="forward, or gradients by")
    add(
        "--values",
        default="samples",
        choices=["samples", "special", "accuracy"],
        help="those of the samples; NaN, infinities, signed zeros and extremes strewn over them; "
        "or those of the samples, where nothing may be less accurate than in eager PyTorch",
    )
    add("--dynamic", action="store_true", help="with a symbol for the rows, at other sizes")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where the samples are")
    add("--samples", type=int, default=0, help="cases of an entry; 0 for all of them")
    add_shard(parser)
    add("--resume", action="store_true", help="keep what the file has")
    add("--workers", type=int, default=1, help="worker processes")
    add("--timeout", type=float, default=120.0, help="seconds for one group")
    add("--minutes", type=float, default=float("inf"), help="begin no entry after these")
    add("--out", type=Path, default=Path("build/conformance.jsonl"), help="file of results")
    add("--admit", action="store_true", help="try unproven claims, and admit those that are right")
    add("--read", nargs="+", type=Path, help="run nothing, read files of results")
    add("--whole", action="store_true", help="the results are complete: drop what they lack")
    add("--write-results", action="store_true", help="bring results into tests/conformance")
    add("--torch", default=torch.__version__, help="the PyTorch that results read were made with")
    add("--write-docs", action="store_true", help="write docs/operators.md from what is committed")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    if options.quick:
        chosen = _quick_entries(options.quick)
    else:
        known = list(_KNOWN[options.values]())
        names = _named(options.ops, known) if options.ops else known
        chosen = all_entries(names, options.dtypes, options.modes)
    limits = {"whole": QUICK_LIMIT, "once": 1}
    table = Table(options.out, resume=options.resume)
    entries = [e for e in chosen[options.shard] if not table.has(e)]
    settings = Settings(
        limit=limits.get(options.quick, options.samples),
        timeout=options.timeout,
        workers=options.workers,
        admit=options.admit,
        special=options.values == "special",
        accuracy=options.values == "accuracy",
        dynamic=options.dynamic,
        group_size=1 if options.dynamic else Settings.group_size,
        deadline=time.monotonic() + 60 * options.minutes,
    )
    finished = 0

    def record(entry: Entry, outcomes: dict[str, Any]) -> None:
        nonlocal finished
        finished += 1
        table.record(entry, outcomes)
        row = table.entries[str(entry)]
        print(f"[{finished}/{len(entries)}] {entry}: {row['class']} {row['cases']}", flush=True)

    run_entries(entries, settings, record)
    return table.entries


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if any case is wrong, crashes, hangs or raises an error."""
    options = _parse(arguments)
    os.environ[DEVICE_VARIABLE] = options.device
    if options.write_docs:
        write_document()
        return 0
    apart = "--dynamic" if options.dynamic else f"--values {options.values}"
    writes, is_quick = options.admit or options.write_results, options.quick and not options.dynamic
    if apart != "--values samples" and (writes or is_quick):
        raise SystemExit(f"{apart} is a check of its own: it proves and writes nothing")
    rows = read_rows(options.read) if options.read else _run(options)
    print(describe(rows))
    if options.admit:
        for change in write_admitted(rows, only_add=not options.whole):
            print(f"admitted: {change}")
    if options.write_results:
        write_results(
            rows, only_add=not options.whole, torch=options.torch, samples=options.samples
        )
    return 1 if any(FAILURES & set(row["cases"]) for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
