"""The command ``python -m tests.random_graphs``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.device import VARIABLE
from tests.random_graphs.outcome import Outcome
from tests.random_graphs.program import Program
from tests.random_graphs.runner import KINDS, drawn, run_programs

BAD = ("wrong", "error", "crash", "timeout")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_graphs", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="programs")
    parser.add_argument("--kind", choices=sorted(KINDS), default="functions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one program")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of programs of this seed")
    parser.add_argument("--device", default="cpu", help="where programs run; drawn on the CPU")
    parser.add_argument("--resume", type=Path, help="a file that keeps the outcomes")
    return parser.parse_args(arguments)


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Return the counts of outcomes, joint sources and reasons of refusals as text."""
    counts = Counter(row["result"] for row in rows.values())
    joints = Counter(row["joint"] or "none" for row in rows.values())
    refusals = Counter(row["reason"][:160] for row in rows.values() if row["result"] == "refused")
    ran = max(1, len(rows) - counts["invalid"])
    lines = [
        f"{len(rows)} programs: " + ", ".join(f"{n} {result}" for result, n in counts.items()),
        "joint function: " + ", ".join(f"{n} {source}" for source, n in joints.items()),
        f"refused: {100 * counts['refused'] / ran:.1f}%",
        *(f"  {n} x {reason}" for reason, n in refusals.most_common()),
    ]
    failed = {number: row for number, row in rows.items() if row["result"] in BAD}
    lines += [f"  {n}: {row['result']}: {row['reason'][:300]}" for n, row in failed.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if any program is wrong, an error, a crash or a timeout."""
    options = _parse(arguments)
    warnings.filterwarnings("ignore")
    os.environ[VARIABLE] = options.device
    head = {"count": options.count, "seed": options.seed, "kind": options.kind}
    kept: dict[str, Any] = {"head": head, "rows": {}}
    if options.resume and options.resume.exists():
        kept = json.loads(options.resume.read_text())
        if kept["head"] != head:
            raise SystemExit(f"{options.resume} is of {kept['head']}, not of {head}")
    rows = kept["rows"]
    chosen = range(options.count) if options.only is None else options.only

    def record(number: int, outcome: Outcome, program: Program) -> None:
        rows[str(number)] = asdict(outcome)
        if outcome.result != "right":
            print(f"{number}: {outcome.result}: {outcome.reason[:400]}")
        if outcome.result in BAD or "BuildError" in outcome.reason:
            print(f"{program.source()}\n{program.script()}")
            rows[str(number)]["program"] = program.to_json()
        sys.stdout.flush()
        if options.resume:
            options.resume.parent.mkdir(parents=True, exist_ok=True)
            options.resume.write_text(json.dumps(kept))

    missing = [number for number in chosen if str(number) not in rows]
    waiting = ((number, drawn(number, options.seed, options.kind)) for number in missing)
    run_programs(waiting, record, workers=options.workers, timeout=options.timeout)
    print(summary(rows))
    return 1 if any(row["result"] in BAD for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
