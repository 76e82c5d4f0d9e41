"""``python -m tests.scripts [names]``: run scripts on compiled code, and print a table.

The exit status is 1 if a script is wrong, raises, or is served less than it must be. It is also 1
if a script that a name selects was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.scripts.script import DOORS, SCRIPTS, Found, Script, missing, run
from tests.scripts.table import load

_ROOT = Path(__file__).parents[2]


def in_process(name: str, door: str, seconds: float = 900.0) -> Found:
    """Run one script in a process of its own."""
    command = [sys.executable, "-m", "tests.scripts", name, "--door", door, "--json"]
    variables = {**os.environ, "TVMBRIDGE_ONLY_IF_FASTER": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=_ROOT, timeout=seconds, env=variables
        )
    except subprocess.TimeoutExpired:
        return Found(error=f"more than {seconds:.0f} s")
    if done.returncode:
        return Found(error=f"exit status {done.returncode}: {done.stderr[-600:]}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def _row(script: Script, door: str, found: Found) -> bool:
    right = found.right(script)
    # TorchDynamo captures nothing of a module whose class is PyTorch's own.
    uncaptured = door == "compile" and not found.calls
    good = right and (uncaptured or found.share >= script.least_of(door))
    verdict = "right" if right else "WRONG"
    cells = f"{found.calls} | {found.share:.0%} | {found.compiled} | {found.difference:.0e}"
    print(f"| `{script.name}` | {door} | {cells} | {verdict} | {found.seconds:.0f} |", flush=True)
    for line in [found.error] * bool(found.error) + (found.reasons if not good else []):
        print(f"    {line}", flush=True)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status. ``arguments``: by default the command line's."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all scripts by default")
    parser.add_argument("--door", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--json", action="store_true", help="run one script in this process")
    parser.add_argument("--seconds", type=float, default=900.0, help="for one script")
    options = parser.parse_args(arguments)
    load()
    for part in options.names:
        if not any(part in name for name in SCRIPTS):
            parser.error(f"no script has {part!r} in its name")
    if options.json:
        print(json.dumps(asdict(run(SCRIPTS[options.names[0]], options.door[0]))))
        return 0
    good = True
    print("| script | door | calls | served by TVM | compilations | difference | | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, script in SCRIPTS.items():
        if options.names and not any(part in name for part in options.names):
            continue
        if why := missing(script):
            print(f"| `{name}` | not run: {why} |||||||", flush=True)
            good = good and not options.names
            continue
        for door in options.door:
            if door in script.doors:
                found = in_process(name, door, options.seconds)
                good = _row(script, door, found) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
