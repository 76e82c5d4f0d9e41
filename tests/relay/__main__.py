"""Run OpInfo's samples of each operator by a TVM that has Relay, and compare with eager PyTorch.

``python -m tests.relay [names] [--dtypes float32 int64] [--samples 4] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tvmbridge
from tests.conformance.case import Case
from tests.conformance.coverage import every_operator
from tests.conformance.samples import cases_of_samples, choose
from tests.relay.running import Relay, difference, tensors_in
from tvmbridge.core.errors import BridgeError


class Calls(nn.Module):
    """One operator called for several cases."""

    def __init__(self, operator: Callable[..., Any], cases: list[Case]) -> None:
        super().__init__()
        self.operator, self.cases = operator, cases

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        rest, results = list(tensors), []
        for case in self.cases:
            count = len(case.tensors)
            args, kwargs = case.arguments(rest[:count])
            results.append(self.operator(*args, **kwargs))
            rest = rest[count:]
        return results


def sweep(names: list[str], dtypes: list[str], samples: int) -> Iterator[tuple[str, str, str]]:
    """Yield operator, dtype and outcome: ``right``, ``refused: ...``, ``wrong: ...``, ``error``."""
    relay = Relay()
    for name, op in sorted(every_operator().items()):
        if names and name not in names:
            continue
        for text in dtypes:
            dtype = getattr(torch, text)
            if dtype not in op.dtypes:
                continue
            torch.manual_seed(0)
            found = cases_of_samples(op.sample_inputs("cpu", dtype, requires_grad=False))
            cases = choose([c for c in found if c.ordinary and c.tensors], samples)
            for outcome in _outcomes(relay, op, cases):
                if outcome.startswith("error: the process ended"):
                    relay.close()
                    relay = Relay()
                yield name, text, outcome
    relay.close()


def _outcomes(relay: Relay, op: Any, cases: list[Case]) -> Iterator[str]:
    """Yield one outcome for all cases if all are right, otherwise one for each."""
    if not cases:
        return
    together = _outcome(relay, op, cases)
    if together == "right" or len(cases) == 1:
        yield together
        return
    outcomes = Counter(_outcome(relay, op, [case]) for case in cases)
    yield from outcomes


def _outcome(relay: Relay, op: Any, cases: list[Case]) -> str:
    module = Calls(getattr(op, "op", op), cases).eval()
    inputs = tuple(t for case in cases for t in case.tensors)
    try:
        with torch.no_grad():
            expected = tensors_in(module(*inputs))
        written = tvmbridge.to_relay(module, inputs)
    except BridgeError as error:
        lines = str(error).splitlines()
        return f"refused: {lines[1].strip() if len(lines) > 1 else lines[0]}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    try:
        wrong = difference(relay.run(written, inputs, level=0), expected)
    except RuntimeError as error:
        return f"error: {str(error).strip()[-300:]}"
    return "right" if wrong is None else f"wrong: {wrong}"


def main() -> None:
    """Print what is not right, and the number of operators by outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int64", "bool"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, dtype, outcome in sweep(options.names, options.dtypes, options.samples):
        counts[outcome.split(":")[0]] += 1
        if not outcome.startswith("right"):
            print(f"{name} {dtype}: {outcome}", flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps([name, dtype, outcome]) + "\n")
    print(dict(counts))


if __name__ == "__main__":
    main()
