"""The command ``python -m tests.architectures``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.architectures.check import DOORS, MODES, SIZES, Outcome
from tests.architectures.runner import Entry, run_entries
from tests.architectures.table import architectures
from tests.device import VARIABLE

_BAD = ("wrong", "crash", "timeout", "error")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all of them by default")
    parser.add_argument("--mode", nargs="+", choices=(*MODES, SIZES), default=list(MODES))
    parser.add_argument("--door", choices=DOORS, default=DOORS[0], help="to compiled code")
    parser.add_argument("--device", default="cpu", help="where models and samples are")
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one entry")
    parser.add_argument("--resume", action="store_true", help="keep what the table has")
    parser.add_argument("--retry", action="store_true", help="with --resume: but not what failed")
    parser.add_argument("--out", type=Path, default=Path("build/architectures.json"))
    return parser.parse_args(arguments)


def _entries(options: argparse.Namespace) -> list[Entry]:
    table = architectures()
    missing = [name for name in options.names if name not in table]
    if missing:
        raise SystemExit(f"no such architectures: {', '.join(missing)}; there are {list(table)}")
    return [
        Entry(name, mode, dtype)
        for name in options.names or table
        for mode in options.mode
        for dtype in options.dtype
        if mode != "cache" or (table[name].cached and dtype == options.dtype[0])
    ]


def _summary(rows: dict[str, dict[str, Any]]) -> str:
    """Return counts by mode and dtype as text, and every outcome that is not *whole*."""
    lines = []
    kinds = dict.fromkeys((row["mode"], row["dtype"]) for row in rows.values())
    for mode, dtype in kinds:
        counts = Counter(
            r["result"] for r in rows.values() if (r["mode"], r["dtype"]) == (mode, dtype)
        )
        lines.append(f"{mode} {dtype}: " + ", ".join(f"{v} {k}" for k, v in counts.items()))
    names = {row["name"] for row in rows.values()}
    whole = [
        n for n in names if all(r["result"] == "whole" for r in rows.values() if r["name"] == n)
    ]
    lines.append(f"whole in everything that was run: {len(whole)} of {len(names)} architectures")
    lines += [
        f"  {key}: {row['result']}: {row['reason'][:300]}"
        for key, row in rows.items()
        if row["result"] != "whole"
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if any outcome is wrong, a crash, a timeout or an error."""
    options = _parse(arguments)
    os.environ[VARIABLE] = options.device
    rows: dict[str, dict[str, Any]] = {}
    if options.resume and options.out.exists():
        rows = json.loads(options.out.read_text())
        if options.retry:
            rows = {key: row for key, row in rows.items() if row["result"] == "whole"}
    entries = [entry for entry in _entries(options) if str(entry) not in rows]
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def record(outcome: Outcome) -> None:
        key = str(Entry(outcome.name, outcome.mode, outcome.dtype))
        rows[key] = asdict(outcome)
        counts = f"native {sum(outcome.native.values())}, ATen {sum(outcome.aten.values())}"
        print(f"{key}: {outcome.result} {outcome.seconds:.0f} s, {counts} {outcome.reason[:300]}")
        sys.stdout.flush()
        options.out.write_text(json.dumps(rows, indent=1))

    run_entries(
        entries, record, workers=options.workers, timeout=options.timeout, door=options.door
    )
    print(_summary(rows))
    return 1 if any(row["result"] in _BAD for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
