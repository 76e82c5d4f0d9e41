"""The overhead of a call through torch.compile beyond the compiled code, against inductor's.

Stand-ins replace the compiled code of both backends and return earlier results at once. The
remaining time is the call's own: Dynamo's guards, arguments, autograd, outputs. The row "Dynamo
alone" uses a backend whose function returns at once. The backends are called in turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph

import tvmbridge
from benchmarks.call_cost import bert_layer, small_network
from benchmarks.common import Row, alternate, parser, report
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.dynamo import tvmbridge as backend

# The methods that run compiled code, by backend; stand-ins replace them.
_CODE = {"tvmbridge": (LoadedModule, "call"), "inductor": (CompiledFxGraph, "__call__")}
_MODULES = {"small network": small_network, "BertLayer": bert_layer}


class Canned:
    """A stand-in for a method that runs compiled code: it records results, then replays them."""

    def __init__(self, owner: type, name: str, genuine: Callable[..., Any]) -> None:
        self.genuine = genuine
        self.recording = True
        self.results: dict[Any, list[Any]] = {}

        def method(this: Any, *given: Any) -> list[Any]:
            key = (id(this), given[0] if isinstance(given[0], str) else "")
            if self.recording:
                self.results[key] = list(self.genuine(this, *given))
                return list(self.results[key])
            if isinstance(given[0], list):
                given[0].clear()  # as inductor's compiled code does
            # Autograd needs new tensors.
            return [r.detach() if isinstance(r, torch.Tensor) else r for r in self.results[key]]

        self.patch = mock.patch.object(owner, name, method)


@contextmanager
def canned(steps: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Record the results of ``steps``; inside the context compiled code replays them."""
    with ExitStack() as stack:
        stand_ins = []
        for owner, name in _CODE.values():
            stand_ins.append(Canned(owner, name, getattr(owner, name)))
            stack.enter_context(stand_ins[-1].patch)
        for step in steps:
            step()
        for stand_in in stand_ins:
            stand_in.recording = False
        yield


def dynamo_alone(graph: Any, _: Any) -> Callable[..., Any]:
    """Compile nothing: return a function that replays the results of the graph's first call."""
    kept: list[Any] = []

    def call(*args: Any) -> Any:
        if not kept:
            kept.extend(graph.forward(*args))
        return kept

    return call


def inference(name: str, rounds: int) -> list[Row]:
    """Measure calls without gradients."""
    steps: list[Callable[[], object]] = []
    for each in (dynamo_alone, "inductor", backend):
        torch.manual_seed(0)
        module, sample = _MODULES[name]()
        compiled = torch.compile(module.eval(), backend=each)
        steps.append(lambda compiled=compiled, x=sample: compiled(x))
    with torch.no_grad():
        return _rows(f"inference, {name}", steps, rounds)


def training(name: str, rounds: int) -> list[Row]:
    """Measure forward and backward by ``torch.autograd.grad``."""
    steps: list[Callable[[], object]] = []
    for each in ("inductor", backend):
        module, sample = _MODULES[name]()
        compiled = torch.compile(module.train(), backend=each)
        wanted = list(module.parameters())

        def step(compiled: Any = compiled, x: Any = sample, wanted: Any = wanted) -> object:
            found = compiled(x)
            y = found[0] if isinstance(found, tuple) else found
            return torch.autograd.grad(y, wanted, torch.ones_like(y))

        steps.append(step)
    return _rows(f"forward and backward, {name}", steps, rounds)


def _rows(title: str, steps: Sequence[Callable[[], object]], rounds: int) -> list[Row]:
    for step in steps:
        for _ in range(4):
            step()
    with canned(steps):
        *alone, theirs, ours = alternate(steps, rounds=rounds, warmup=50)
    rows = [Row(f"{title}, Dynamo alone", seconds * 1e6, "us") for seconds in alone]
    return [
        *rows,
        Row(f"{title}, inductor", theirs * 1e6, "us"),
        Row(f"{title}, tvmbridge", ours * 1e6, "us"),
        Row(f"{title}, tvmbridge over inductor", ours / theirs, "", 1.0),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure and print all rows."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=2000, help="timed calls of each")
    options.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    options.add_argument("--only", nargs="*", default=list(_MODULES), help="modules to measure")
    chosen = options.parse_args(list(argv))
    torch.set_num_threads(chosen.threads)
    rows: list[Row] = []
    for name in chosen.only:
        rows += inference(name, chosen.rounds)
        rows += training(name, chosen.rounds)
    assert all(g.whole for g in tvmbridge.compile_report().graphs), tvmbridge.compile_report()
    return report("a call through torch.compile", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
