"""The fx passes: copies, launches, and times against eager PyTorch and ``torch.compile``.

The benchmark uses a GPU if there is one, and otherwise leaves out the figures that need one. The
DLRM's step with communication is measured by
``torchrun --nproc-per-node 2 -m benchmarks.recommender_step``.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import tvmbridge
from benchmarks.common import Row, alternate, parser, report
from examples.dlrm.clicks import Clicks
from examples.dlrm.model import Sizes
from examples.dlrm.train import Place, Step, make
from tvmbridge.fx.collate import combine
from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROWS = ("copies", "chains", "dlrm")
_VIEWS = {"split", "unflatten", "flatten", "narrow", "slice", "view", "as_strided", "select"}


class Chains(nn.Module):
    """tanh(LayerNorm(x_i)) on each slice x_i of a tensor."""

    def __init__(self, count: int = 100, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of the chains, concatenated."""
        pairs = zip(self.norms, x.split(self.width, 1), strict=True)
        return torch.cat([torch.tanh(norm(part)) for norm, part in pairs], 1)


def synchronized(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls ``call`` and waits until the device is done."""

    def run() -> None:
        call()
        if CUDA:
            torch.cuda.synchronize()

    return run


def counted(call: Callable[[], Any], what: str) -> int:
    """Return how many copies to the device, or launches, PyTorch's profiler counts in a call.

    Without a GPU a launch is an operator that is no view.

    Args:
        call: the call to profile.
        what: ``"copies"`` or ``"launches"``.
    """
    call()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * CUDA
    with profile(activities=activities) as profiled:
        synchronized(call)()
    events = list(profiled.events() or ())
    if CUDA:
        on_device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        copies = [n for n in on_device if "HtoD" in n]
        moved = [n for n in on_device if n.startswith(("Memcpy", "Memset"))]
        return len(copies) if what == "copies" else len(on_device) - len(moved)
    outermost = [e.name.removeprefix("aten::") for e in events if e.cpu_parent is None]
    return sum(name not in _VIEWS for name in outermost)


def copies(count: int) -> list[Row]:
    """Measure the copy of a batch of ``count`` features: the number of copies, and the time."""
    draw = torch.Generator().manual_seed(0)
    features = {}
    for index in range(count):
        lengths = torch.randint(0, 5, (512,), generator=draw)
        indices = torch.randint(0, 1000, (int(lengths.sum()),), generator=draw)
        features[str(index)] = Jagged(indices, lengths)
    combined = combine(features).pin_memory()
    separate = {
        k: Jagged(j.indices.pin_memory(), j.lengths.pin_memory()) for k, j in features.items()
    }

    def apart() -> list[Any]:
        held = [t for jagged in separate.values() for t in (jagged.indices, jagged.lengths)]
        return [tensor.to(DEVICE, non_blocking=True) for tensor in held]

    def together() -> CombinedFeatures:
        return combined.to(DEVICE, non_blocking=True)

    before, after = alternate([synchronized(apart), synchronized(together)], rounds=30)
    return [
        Row(f"copies of {count} features, apart", counted(apart, "copies")),
        Row(f"copies of {count} features, combined", counted(together, "copies"), bound=2),
        Row(f"time of the copy of {count} features", after / before, "of before", 0.1),
    ]


def chains(rows: int, *, rounds: int, compiled: bool) -> list[Row]:
    """Measure a hundred chains: launches, and times over eager PyTorch and torch.compile."""
    module = Chains().to(DEVICE)
    x = torch.randn(rows, 6400, device=DEVICE, requires_grad=True)
    rewritten = tvmbridge.optimize_fx(copy.deepcopy(module), x, measure=False)
    others: dict[str, Any] = {"eager": module}
    if compiled:
        others["torch.compile"] = torch.compile(copy.deepcopy(module))
        if CUDA:
            others["reduce-overhead"] = torch.compile(copy.deepcopy(module), mode="reduce-overhead")
    found = []
    with torch.no_grad():
        name = "launches of 100 chains"
        before = counted(lambda: module(x), "launches")
        after = counted(lambda: rewritten(x), "launches")
    found += [Row(f"{name}, eager", before), Row(f"{name}, rewritten", after, bound=5)]
    bounds = {"eager": 0.15, "torch.compile": 0.3, "reduce-overhead": 0.7}
    for what, step in (("forward", forward), ("with backward", backward)):
        calls = [synchronized(step(each, x)) for each in (rewritten, *others.values())]
        own, *times = alternate(calls, rounds=rounds)
        found.append(Row(f"{what}, {rows} rows", own * 1e3, "ms"))
        for name, seconds in zip(others, times, strict=True):
            bound = bounds[name] if CUDA else None
            found.append(Row(f"{what}, {rows} rows", own / seconds, f"of {name}", bound))
    return found


def forward(module: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Return a function that calls the module without gradients."""

    def run() -> Any:
        with torch.no_grad():
            return module(x)

    return run


def backward(module: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Return a function that calls the module and runs backward."""
    parameters = list(module.parameters())

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        module(x).sum().backward()

    return run


def dlrm(features: int, *, rounds: int) -> list[Row]:
    """Measure the DLRM's training step on one device, with the batch's copies, against eager."""
    sizes, place = Sizes(features=features), Place(0, 1, DEVICE)
    batch = Clicks(sizes, 512)[0]
    on_device = batch.to(DEVICE)
    plain, rewritten = make(sizes, place), make(sizes, place)
    start = time.perf_counter()
    sample = (on_device.dense, on_device.features)
    tvmbridge.optimize_fx(rewritten, sample, measure=False)
    seconds = time.perf_counter() - start
    steps = Step(plain, place), Step(rewritten, place)
    separate = batch.features.separate()

    def eager() -> None:
        dense, labels = batch.dense.to(DEVICE), batch.labels.to(DEVICE)
        steps[0](type(batch)(dense, labels, separate.to(DEVICE)))  # type: ignore[arg-type]

    def ours() -> None:
        steps[1](batch.to(DEVICE))

    own, other = alternate([synchronized(ours), synchronized(eager)], rounds=rounds)
    assert not tvmbridge.fx_report(rewritten).fallbacks, tvmbridge.fx_report(rewritten)
    name = f"DLRM, {features} features"
    return [
        Row(f"{name}: rewriting", seconds, "s"),
        Row(f"{name}: step", own * 1e3, "ms"),
        Row(f"{name}: step", own / other, "of eager", 0.4 if CUDA else None),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure the rows that this machine can run."""
    options = parser(__doc__)
    options.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    options.add_argument("--quick", action="store_true", help="fewer rounds and features")
    options.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    chosen = options.parse_args(argv)
    rounds = 5 if chosen.quick else 30
    rows: list[Row] = []
    if CUDA and "copies" in chosen.rows:
        for count in (100, 1000):
            rows += copies(count)
    if "chains" in chosen.rows:
        rows += chains(512, rounds=rounds, compiled=not chosen.no_compile)
    if "dlrm" in chosen.rows:
        rows += dlrm(26 if chosen.quick else 200, rounds=rounds)
    return report(f"fx passes on {DEVICE.type}", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
