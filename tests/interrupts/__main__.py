"""``python -m tests.interrupts [names] [--seconds 60] [--seed 0]``: interrupt each subject often.

Each subject runs in a process of its own, since an interrupt may crash the process. The exit status
is 1 if a subject failed or crashed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.interrupts.storm import storm
from tests.interrupts.subjects import SUBJECTS


def main() -> int:
    """Run the stress test of each subject, and print the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SUBJECTS), metavar="name")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(SUBJECTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    if asked.here:
        for name in asked.names:
            with SUBJECTS[name]() as subject:
                found = storm(subject, asked.seconds, asked.seed)
            print(f"{name}: {found.interrupts} interrupts, {found.steps} steps", flush=True)
        return 0
    options = ["--here", "--seconds", str(asked.seconds), "--seed", str(asked.seed)]
    failed = 0
    for name in asked.names:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.interrupts", name, *options]
        if code := subprocess.run(command, check=False).returncode:
            print(f"{name}: the process ended with {code}", flush=True)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
