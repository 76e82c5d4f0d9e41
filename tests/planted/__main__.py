"""The command ``python -m tests.planted``: plant each mistake in turn, and run its tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from tests.planted.plant import ROOT, VARIABLE, Plant
from tests.planted.table import ON_GPUS, PLANTS

# pytest's exit status if tests ran and some failed.
SOME_FAILED = 1


@dataclass(frozen=True)
class Verdict:
    """The outcome of running a plant's tests with the mistake planted.

    - ``caught``: whether a test failed or crashed.
    - ``seconds``: how long the tests took.
    - ``last``: the end of pytest's output.
    """

    plant: Plant
    caught: bool
    seconds: float
    last: str


def run_tests(tests: Sequence[str], plant: str = "", timeout: float = 600.0) -> tuple[int, str]:
    """Run pytest on ``tests`` in a process; return its exit status and the end of its output.

    The status is negative if the process crashes or takes longer than ``timeout`` seconds.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, VARIABLE: plant, "PYTHONPATH": os.pathsep.join(search)}
    try:
        done = subprocess.run(
            [*command, "-p", "tests.planted.plugin", *tests],
            cwd=ROOT,
            env=environment,
            text=True,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return -1, f"nothing for {timeout:.0f} s"
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def verdict(plant: Plant) -> Verdict:
    """Run the tests of ``plant`` with the mistake planted, and return the verdict.

    A crash counts as caught, since nobody overlooks it. A run in which pytest finds no test does
    not count.
    """
    start = time.perf_counter()
    status, output = run_tests(plant.tests, plant.name)
    caught = status == SOME_FAILED or status < 0
    return Verdict(plant, caught, time.perf_counter() - start, output)


def unclean(plants: Sequence[Plant], workers: int) -> dict[tuple[str, ...], str]:
    """Return the test selections that fail without any mistake, with the end of pytest's output."""
    selections = list(dict.fromkeys(plant.tests for plant in plants))
    print(f"{len(selections)} selections without a mistake ...", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        found = zip(selections, pool.map(run_tests, selections), strict=True)
        return {tests: output for tests, (status, output) in found if status}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: print a line for each plant.

    Returns:
        1 if a mistake is not caught, or a selection of tests fails without it; else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="mistakes; all of them by default")
    parser.add_argument("--gpu", action="store_true", help="those that need a GPU instead")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    options = parser.parse_args(arguments)
    table = ON_GPUS if options.gpu else PLANTS
    unknown = [name for name in options.names if name not in table]
    if unknown:
        raise SystemExit(f"no such mistakes: {', '.join(unknown)}; there are {', '.join(table)}")
    plants = [table[name] for name in options.names] or list(table.values())
    if options.list:
        for plant in plants:
            print(f"{plant.part:10} {plant.name:40} {' '.join(plant.tests)}")
        return 0
    failures = unclean(plants, options.workers)
    for tests, output in failures.items():
        print(f"does not pass without a mistake: {' '.join(tests)}\n{output}")
    tried = [plant for plant in plants if plant.tests not in failures]
    missed = 0
    with ThreadPoolExecutor(options.workers) as pool:
        # In order of completion, so that a slow plant does not delay the output of others.
        for found in map(Future.result, as_completed([pool.submit(verdict, p) for p in tried])):
            word = "caught" if found.caught else "NOT CAUGHT"
            print(f"{found.plant.part:10} {found.plant.name:40} {word} {found.seconds:.0f} s")
            sys.stdout.flush()
            if not found.caught:
                missed += 1
                print(found.last[-800:])
    print(f"{len(tried) - missed} of {len(plants)} caught")
    return 1 if missed or failures else 0


if __name__ == "__main__":
    sys.exit(main())
