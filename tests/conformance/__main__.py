"""The command ``python -m tests.conformance``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.quick import QUICK_DTYPES, QUICK_LIMIT, QUICK_OPERATORS
from tests.conformance.runner import Entry, Settings, run_entries
from tests.conformance.samples import operators
from tests.conformance.table import Table


def all_entries(names: Sequence[str], dtypes: Sequence[str]) -> list[Entry]:
    """Every operator of ``names`` in every dtype of ``dtypes`` that it takes."""
    table = operators()
    return [
        Entry(name, dtype)
        for dtype in dtypes
        for name in names
        if getattr(torch, dtype) in table[name].supported_dtypes("cpu")
    ]


def _named(wanted: Sequence[str]) -> list[str]:
    """Full names for what the user wrote: a name stands for all its variants."""
    names = [n for w in wanted for n in operators() if w in (n, n.split(":")[0])]
    missing = [w for w in wanted if not any(w in (n, n.split(":")[0]) for n in operators())]
    if missing:
        raise SystemExit(f"no such operators: {', '.join(missing)}")
    return names


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the curated set")
    parser.add_argument("--ops", nargs="+", help="operators, by their name in OpInfo")
    parser.add_argument("--dtypes", nargs="+", help="such as float32 int64")
    parser.add_argument("--samples", type=int, help="cases of an entry; 0 for all of them")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th entry, from the i-th")
    parser.add_argument("--resume", action="store_true", help="keep what the table has")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one group")
    parser.add_argument("--out", type=Path, default=Path("build/conformance.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 when anything is wrong, crashed or an error."""
    options = _parse(arguments)
    if options.ops:
        names = _named(options.ops)
    else:
        names = list(QUICK_OPERATORS if options.quick else operators())
    dtypes = options.dtypes or (QUICK_DTYPES if options.quick else ["float32"])
    limit = options.samples
    if limit is None:
        limit = QUICK_LIMIT if options.quick else 0
    index, count = (int(part) for part in options.shard.split("/"))
    table = Table(options.out, resume=options.resume)
    entries = [e for e in all_entries(names, dtypes)[index::count] if not table.has(e)]
    settings = Settings(limit=limit, timeout=options.timeout, workers=options.workers)
    finished = 0

    def record(entry: Entry, outcomes: dict[str, Any]) -> None:
        nonlocal finished
        finished += 1
        table.record(entry, outcomes)
        row = table.entries[str(entry)]
        print(f"[{finished}/{len(entries)}] {entry}: {row['class']} {row['cases']}", flush=True)

    run_entries(entries, settings, record)
    print(table.summary())
    return 1 if table.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
