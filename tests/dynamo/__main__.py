"""Count the modules that run as one graph: our backend, inductor, torch.export and TorchScript.

``python -m tests.dynamo python`` uses modules with constructs of Python. ``modules`` uses the
modules that PyTorch tests torch.nn with.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tests.dynamo import test_hard_python as hard
from tests.dynamo.doors import DOORS, Arguments, through

CONSTRUCTS = {
    "generators": hard.Generators,
    "closures": hard.Closures,
    "data classes": hard.DataClasses,
    "`**kwargs`": hard.Keywords,
    "lists filled in loops": hard.Lists,
    "attributes written in forward": hard.Attributes,
    "`try`": hard.Tries,
    "recursion": hard.Recursion,
    "early returns": hard.EarlyReturns,
    "branches on the values of a tensor": hard.Branches,
    "`print`, logging": hard.Printing,
    "`.item()`": hard.Numbers,
}
_MOST_SAMPLES = 3


def constructs() -> Iterator[tuple[str, nn.Module, list[Arguments]]]:
    """Yield a module for each construct of Python, with calls that take different branches."""
    for name, kind in CONSTRUCTS.items():
        torch.manual_seed(0)
        module, x = kind().eval(), torch.randn(4, 8)
        more = [(True,), (False,)] if kind is hard.EarlyReturns else [(), ()]
        calls: list[Arguments] = [
            ((v, *given), {}) for v, given in zip((x, -3 * x.abs()), more, strict=True)
        ]
        yield name, module, calls


class Caller(nn.Module):
    """A wrapper, because Dynamo captures no graph of an outermost module of torch.nn."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def modules() -> Iterator[tuple[str, nn.Module, list[Arguments]]]:
    """Yield modules of torch.nn that run in eval mode, each with some of its samples."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if torch.float32 not in info.dtypes or "Lazy" in info.name:
            continue
        options: Any = {"device": "cpu", "dtype": torch.float32, "requires_grad": False}
        found = list(info.module_inputs_func(info, training=False, **options))
        found = [s for s in found if s.forward_input is not None]
        for sample in found[:: max(1, -(-len(found) // _MOST_SAMPLES))]:
            made, given = sample.constructor_input, sample.forward_input
            torch.manual_seed(0)
            module = Caller(info.module_cls(*made.args, **made.kwargs)).eval()
            try:
                with torch.no_grad():
                    module(*given.args, **given.kwargs)
            except (RuntimeError, ValueError, NotImplementedError, AssertionError):
                continue
            yield f"{info.name} {sample.desc}", module, [(given.args, given.kwargs)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if our result is wrong or inductor runs more modules whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.dynamo", description=__doc__)
    parser.add_argument("corpus", choices=("python", "modules"))
    parser.add_argument("--doors", nargs="+", choices=list(DOORS), default=list(DOORS))
    chosen = parser.parse_args(arguments)
    counts: dict[str, Counter[str]] = {door: Counter() for door in chosen.doors}
    print(f"| | {' | '.join(chosen.doors)} |\n|---|{'---|' * len(chosen.doors)}")
    for name, module, calls in constructs() if chosen.corpus == "python" else modules():
        row = {door: through(door, module, calls) for door in chosen.doors}
        for door, result in row.items():
            counts[door][result] += 1
        if chosen.corpus == "python" or set(row.values()) != {"whole"}:
            print(f"| {name} | {' | '.join(row.values())} |", flush=True)
    for door, count in counts.items():
        told = ", ".join(f"{number} {result}" for result, number in count.items())
        print(f"{door}: {told}")
    ours, theirs = counts.get("tvmbridge", Counter()), counts.get("inductor", Counter())
    return int(ours["wrong"] > 0 or ours["whole"] < theirs["whole"])


if __name__ == "__main__":
    sys.exit(main())
