"""What a dispatched inference call costs over the bare compiled call, in microseconds.

The bare call is made with the very tensors that the dispatched call hands to compiled code. For a
module whose code runs for milliseconds the difference of two times would drown in their noise, so
there the compiled call is replaced by one that only returns its results, and what is left is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest import mock

import torch
from torch import nn

from benchmarks.common import Row, alternate, parser, report
from tests.end_to_end.steps import base_layer
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.executable import LoadedModule

BOUND = 30.0


class Recorder:
    """Stands in for ``LoadedModule.call``; keeps the last call and its results."""

    def __init__(self) -> None:
        self.genuine = LoadedModule.call

    def record(
        self, loaded: LoadedModule, name: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Make the call and keep it."""
        self.loaded, self.name, self.tensors = loaded, name, tensors
        self.results = self.genuine(loaded, name, tensors)
        return list(self.results)

    def bare(self) -> list[torch.Tensor]:
        """The compiled call that was kept, without dispatch."""
        return self.genuine(self.loaded, self.name, self.tensors)

    def canned(self, *_: object) -> list[torch.Tensor]:
        """The results that were kept."""
        return list(self.results)


def recorded(module: nn.Module, sample: torch.Tensor) -> Recorder:
    """Dispatch ``module`` for inference and record one call."""
    add_tvm_dispatch(module.eval(), sample)
    recorder = Recorder()
    with mock.patch.object(LoadedModule, "call", lambda *call: recorder.record(*call)):
        module(sample)
    assert not dispatch_report(module).fallbacks, dispatch_report(module).fallbacks
    return recorder


def measure_small(rounds: int) -> list[Row]:
    """A module that computes next to nothing: dispatched and bare calls in turns."""
    module, sample = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    recorder = recorded(module, sample)
    whole, bare = alternate([lambda: module(sample), recorder.bare], rounds=rounds, warmup=50)
    return [
        Row("small module: bare call", bare * 1e6, "us"),
        Row("small module: dispatched call", whole * 1e6, "us"),
        Row("small module: cost of dispatch", (whole - bare) * 1e6, "us", BOUND),
    ]


def measure_layer(rounds: int) -> list[Row]:
    """A BertLayer, with the compiled call left out."""
    layer, sample = base_layer("sdpa"), torch.randn(1, 14, 768)
    recorder = recorded(layer, sample)
    with mock.patch.object(LoadedModule, "call", recorder.canned):
        (cost,) = alternate([lambda: layer(sample)], rounds=rounds, warmup=50)
    return [Row("BertLayer 1x14: cost of dispatch", cost * 1e6, "us", BOUND)]


def main(argv: Sequence[str] = ()) -> int:
    """Measure both."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3000, help="timed calls of each")
    chosen = options.parse_args(list(argv))
    with torch.no_grad():
        rows = measure_small(chosen.rounds) + measure_layer(chosen.rounds)
    return report("a dispatched call", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
