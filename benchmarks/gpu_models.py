"""Inference of twenty models of torchvision, timm and transformers through torch.compile.

Each model is compiled in its own process, several at a time. Then one process at a time measures:
eager PyTorch and the backends are called in turns. Weights are random.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Lock, Semaphore
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

import tvmbridge.dynamo
from benchmarks.common import parser

_VISION = (
    "resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "regnet_y_400mf",
    "convnext_tiny", "swin_t", "vit_b_16", "vgg11",
)  # fmt: skip
_TIMM = ("deit_tiny_patch16_224", "mixer_s16_224", "mobilenetv3_large_100", "ghostnet_100")
_TRANSFORMERS = {
    "bert": "BertModel", "distilbert": "DistilBertModel", "gpt2": "GPT2Model",
    "albert": "AlbertModel", "electra": "ElectraModel", "roberta": "RobertaModel",
}  # fmt: skip
NAMES = (*_VISION, *_TIMM, *_TRANSFORMERS)


@dataclass
class Result:
    """Milliseconds of a call and seconds of the first call, by backend, and the error if any."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def speed(self) -> float:
        """Return eager PyTorch's time over tvmbridge's time."""
        nothing = math.nan
        return self.milliseconds.get("eager", nothing) / self.milliseconds.get("tvmbridge", nothing)


def _made(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name in _TRANSFORMERS:
        import transformers

        kind = getattr(transformers, _TRANSFORMERS[name])
        return kind(kind.config_class()), torch.randint(10, 1000, (batch, 128))
    images = torch.randn(batch, 3, 224, 224)
    if name in _TIMM:
        import timm

        return timm.create_model(name, pretrained=False), images
    import torchvision

    return torchvision.models.get_model(name, weights=None), images


def _calls(
    name: str, device: str, dtype: torch.dtype, batch: int, backends: Sequence[str], result: Result
) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {}
    for backend in ("eager", *backends):
        module, x = _made(name, batch)
        module = module.to(device, dtype).eval()
        x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
        start = time.perf_counter()
        if backend != "eager":
            torch.compiler.reset()
            # Pass the function: the backend's name is known only if the package is installed.
            ours = backend == "tvmbridge"
            module.compile(backend=tvmbridge.dynamo.tvmbridge if ours else backend)
        with torch.no_grad():
            module(x)
            _wait(device)
            result.seconds[backend] = time.perf_counter() - start
            for _ in range(5):
                module(x)

        def call(module: nn.Module = module, x: torch.Tensor = x) -> Any:
            with torch.no_grad():
                return module(x)

        calls[backend] = call
    _wait(device)
    return calls


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(call: Callable[[], Any], count: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return (time.perf_counter() - start) / count * 1e3


def _measure(name: str, options: Any, compiling: Semaphore, alone: Lock, results: Any) -> None:
    result, calls = Result(name), dict[str, Callable[[], Any]]()
    dtype = getattr(torch, options.dtype)
    try:
        with compiling:
            calls = _calls(name, options.device, dtype, options.batch, options.backends, result)
    except Exception as error:
        result.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    options.ready.wait()
    if calls:
        with alone:
            result.milliseconds = _alternate(calls, options.rounds, options.device)
    results.put(result)


def _alternate(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Return the median milliseconds of each call, in turns of about sixty milliseconds."""
    taken: dict[str, list[float]] = {backend: [] for backend in calls}
    count = max(3, int(60 / max(_timed(calls["eager"], 5, device), 0.1)))
    for number in range(rounds + 1):
        for backend, call in calls.items():
            milliseconds = _timed(call, count, device)
            if number:
                taken[backend].append(milliseconds)
    return {backend: statistics.median(each) for backend, each in taken.items()}


def _print(results: Sequence[Result], backends: Sequence[str]) -> None:
    heads = [f"{name} ms (s)" for name in ("eager", *backends)]
    table = Table("", *heads, "eager / tvmbridge")
    for result in sorted(results, key=lambda r: NAMES.index(r.name)):
        cells = [
            f"{result.milliseconds[b]:.2f} ({result.seconds[b]:.0f})"
            if b in result.milliseconds
            else "-"
            for b in ("eager", *backends)
        ]
        table.add_row(result.name, *cells, f"{result.speed:.2f}")
    Console(width=130).print(table)
    speeds = [r.speed for r in results if not math.isnan(r.speed)]
    if speeds:
        mean = math.exp(statistics.fmean(map(math.log, speeds)))
        print(
            f"{len(speeds)} models: geometric mean {mean:.2f}, best {max(speeds):.2f}, least",
            end=" ",
        )
        print(f"{min(speeds):.2f}")
    ratios = [
        r.seconds["tvmbridge"] / r.seconds["inductor"]
        for r in results
        if {"tvmbridge", "inductor"} <= set(r.seconds)
    ]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"seconds to the first result over inductor's: geometric mean {mean:.2f}")
    for result in results:
        if result.error:
            print(f"{result.name}: {result.error}")


def main(argv: Sequence[str] = ()) -> int:
    """Measure all models, and print the table."""
    options = parser(__doc__)
    options.add_argument("names", nargs="*", help="models; all of them by default")
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--jobs", type=int, default=1, help="models compiled at a time")
    options.add_argument("--backends", nargs="+", default=["inductor", "tvmbridge"])
    chosen = options.parse_args(list(argv))
    names = chosen.names or NAMES
    context = mp.get_context("spawn")
    chosen.ready = context.Barrier(len(names), timeout=1200)
    compiling, alone = context.Semaphore(chosen.jobs), context.Lock()
    queue: Any = context.Queue()
    processes: list[SpawnProcess] = []
    for name in names:
        process = context.Process(target=_measure, args=(name, chosen, compiling, alone, queue))
        process.start()
        processes.append(process)
    results = [queue.get(timeout=1800) for _ in names]
    for process in processes:
        process.join()
    _print(results, chosen.backends)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
