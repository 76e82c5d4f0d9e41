"""The command ``python -m tests.random_sizes``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from tests.random_sizes.models import MODELS
from tests.random_sizes.sequences import Outcome, drawn, run


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_sizes", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="sequences")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of sequences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin none after these"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a sequence is wrong or raises an error."""
    options = _parse(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    numbers = options.only or range(options.first, options.first + options.count)
    outcomes: list[tuple[str, Outcome]] = []
    end = time.monotonic() + 60 * options.minutes
    for number in numbers:
        if time.monotonic() > end:
            break
        sequence = drawn(number, options.seed)
        print(sequence, flush=True)  # after a crash, the last line names the sequence
        outcome = run(sequence)
        outcomes.append((sequence.name, outcome))
        print(f"    {outcome.result}, served {outcome.served} of {outcome.calls} {outcome.reason}")
    results = Counter(outcome.result for _, outcome in outcomes)
    print(f"{len(outcomes)} sequences: " + ", ".join(f"{n} {r}" for r, n in results.items()))
    for name in MODELS:
        mine = [o for n, o in outcomes if n == name]
        print(
            f"  {name}: served {sum(o.served for o in mine)} of {sum(o.calls for o in mine)} calls"
        )
    return 1 if set(results) - {"right"} else 0


if __name__ == "__main__":
    sys.exit(main())
