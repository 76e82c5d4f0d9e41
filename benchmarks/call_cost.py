"""The overhead of a dispatched call beyond the compiled code itself, in microseconds.

Stand-ins replace the compiled functions and return earlier results at once. The remaining time is
the call's own: guards, arguments, autograd, outputs. Training is a forward and a backward by
``torch.autograd.grad``. The row "autograd alone" runs an empty autograd function with as many
tensors and gradients; any training of a PyTorch module pays for that. The last rows compare a
small network as a whole with eager PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertModel

from benchmarks.common import Row, alternate, parser, report
from tests.end_to_end.steps import base_layer
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.executable import LoadedModule

Made = tuple[nn.Module, torch.Tensor]


class Canned:
    """A stand-in for ``LoadedModule.call`` that returns the recorded results of each function."""

    def __init__(self) -> None:
        self.genuine = LoadedModule.call
        self.results: dict[str, list[torch.Tensor]] = {}
        # Autograd needs new tensors for this number of leading results.
        self.fresh = 0

    def record(self, loaded: LoadedModule, name: str, values: Sequence[Any]) -> list[torch.Tensor]:
        """Make the call and record its results."""
        self.results[name] = self.genuine(loaded, name, values)
        return list(self.results[name])

    def replay(self, _: LoadedModule, name: str, values: Sequence[Any]) -> list[torch.Tensor]:
        """Return the recorded results; the first ``fresh`` of them are new tensors."""
        results = self.results[name]
        return [*(r.detach() for r in results[: self.fresh]), *results[self.fresh :]]


def small_network() -> Made:
    """Return Linear, GELU, LayerNorm, Linear of 256 features, and an input of 64 rows."""
    torch.manual_seed(7)
    layers = [nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256)]
    return nn.Sequential(*layers), torch.randn(64, 256)


def bert_layer() -> Made:
    """Return a layer of BERT-base without dropout (16 parameters), and its input."""
    return without_dropout(base_layer("sdpa")), torch.randn(1, 14, 768)


def bert_base(layers: int = 12) -> Made:
    """Return BERT-base without dropout (199 parameters), and its input."""
    config = BertConfig(num_hidden_layers=layers, attn_implementation="sdpa", return_dict=False)
    return without_dropout(BertModel(config)), torch.arange(14)[None] + 1000


def without_dropout(module: nn.Module) -> nn.Module:
    """Set all dropout rates to 0, because PyTorch draws the random numbers; return ``module``."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


MODULES: dict[str, tuple[Callable[[], Made], float, float]] = {
    "small network": (small_network, 8, 25),
    "BertLayer": (bert_layer, 10, 35),
    "BERT-base": (bert_base, 15, 60),
}


@contextmanager
def canned(module: nn.Module, call: Callable[[], object], num_outputs: int = 0) -> Iterator[None]:
    """Record the results of ``call``; inside the context compiled functions replay them.

    Autograd gets new tensors for the first ``num_outputs`` results.
    """
    stand_in = Canned()
    stand_in.fresh = num_outputs
    for _ in range(3):
        call()
    with mock.patch.object(LoadedModule, "call", lambda *given: stand_in.record(*given)):
        call()
    assert not dispatch_report(module).fallbacks, dispatch_report(module).fallbacks
    with mock.patch.object(LoadedModule, "call", lambda *given: stand_in.replay(*given)):
        yield


def inference(name: str, made: Callable[[], Made], rounds: int, bound: float) -> list[Row]:
    """Return the overhead of a call without gradients."""
    module, sample = made()
    with torch.no_grad():
        add_tvm_dispatch(module.eval(), sample)
        with canned(module, lambda: module(sample)):
            (cost,) = alternate([lambda: module(sample)], rounds=rounds, warmup=50)
    return [Row(f"inference, {name}", cost * 1e6, "us", bound)]


class Least(torch.autograd.Function):
    """An autograd function that computes nothing: it returns given tensors and gradients."""

    @staticmethod
    def forward(ctx: Any, kept: tuple[list[torch.Tensor], list[torch.Tensor]], *_: Any) -> Any:
        outputs, ctx.gradients = kept
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


def training(name: str, made: Callable[[], Made], rounds: int, bound: float) -> list[Row]:
    """Return the overhead of forward and backward together."""
    module, sample = made()
    add_tvm_dispatch(module.train(), sample)
    outputs = pytree.tree_leaves(module(sample))
    cotangents = [torch.ones_like(output) for output in outputs]
    wanted = [p for p in module.parameters() if p.requires_grad]

    def step() -> object:
        return torch.autograd.grad(pytree.tree_leaves(module(sample)), wanted, cotangents)

    kept = ([o.detach() for o in outputs], [torch.zeros_like(p) for p in wanted])

    def least() -> object:
        found = Least.apply(kept, *wanted)  # type: ignore[no-untyped-call]
        return torch.autograd.grad(pytree.tree_leaves(found), wanted, cotangents)

    with canned(module, step, len(outputs)):
        cost, floor = alternate([step, least], rounds=rounds, warmup=50)
    return [
        Row(f"forward and backward, {name}, autograd alone", floor * 1e6, "us"),
        Row(f"forward and backward, {name}, beyond that", (cost - floor) * 1e6, "us", bound),
    ]


def whole(rounds: int) -> list[Row]:
    """Return the times of a small network through TVM, over the times of eager PyTorch."""
    (eager, sample), (module, _) = small_network(), small_network()
    cotangent = torch.randn(64, 256)

    def step(which: nn.Module) -> None:
        which(sample).backward(cotangent)
        which.zero_grad()

    with torch.no_grad():
        add_tvm_dispatch(module.eval(), sample)
        eager.eval()
        theirs, ours = alternate(
            [lambda: eager(sample), lambda: module(sample)], rounds=rounds, warmup=50
        )
    rows = [Row("small network, TVM over eager: inference", ours / theirs, "", 1.0)]
    add_tvm_dispatch(module.train(), sample)
    eager.train()
    theirs, ours = alternate([lambda: step(eager), lambda: step(module)], rounds=rounds, warmup=50)
    assert not dispatch_report(module).fallbacks, dispatch_report(module).fallbacks
    return [*rows, Row("small network: forward and backward", ours / theirs, "", 1.0)]


def main(argv: Sequence[str] = ()) -> int:
    """Measure and print all rows."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=2000, help="timed calls of each")
    options.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    options.add_argument("--only", nargs="*", default=list(MODULES), help="modules to measure")
    chosen = options.parse_args(list(argv))
    torch.set_num_threads(chosen.threads)
    rows: list[Row] = []
    for name in chosen.only:
        made, bound, training_bound = MODULES[name]
        rows += inference(name, made, chosen.rounds, bound)
        rows += training(name, made, chosen.rounds, training_bound)
    rows += whole(chosen.rounds)
    return report("a dispatched call", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
