"""Calls that are slower than eager PyTorch after the first 20: each is named.

A model is dispatched with the default options and called 20 times with a batch. Then its calls and
those of an eager copy are timed in turns. The models are those of ``tests/architectures``, models
of torchvision, and the layers of torch.nn on PyTorch's samples of them. Each model and mode runs in
a process of its own, on ``--threads`` cores of its own; ``--workers`` processes run at once.
The file ``--out`` has a line of JSON for each measured batch. ``--resume`` keeps it, and measures
what it lacks. On a busy machine, ``--clock cpu --threads 1`` times by the process's CPU time.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.common import in_turns
from tests.architectures.check import tensors, with_rows
from tests.architectures.table import architectures
from tests.end_to_end.test_every_module import INFOS
from tests.export.suites import SUITES
from tests.processes import Died, add_shard, in_threads, run_alone
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.speed_trial import VARIABLE

_FIRST_CALLS = 20
# The most times eager's time that a call may take.
_BOUND = 1.03
# Shorter calls are timed several at a time.
_LEAST_SECONDS = 300e-6
# A ratio above the bound is measured again up to this often; the least one counts.
_ATTEMPTS = 3
_MODES = ("inference", "training")
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_TORCHVISION = 20

Model = tuple[nn.Module, dict[str, Any]]


class Entry(NamedTuple):
    """A model of a suite, in one mode."""

    suite: str
    name: str
    mode: str

    def __str__(self) -> str:
        return f"{self.suite}/{self.name}/{self.mode}"


@dataclass(frozen=True)
class Line:
    """The result for one batch.

    - ``eager``, ``dispatched``: median seconds of a call; in training of forward and backward.
    - ``aside``: whether the module's own forward serves, because a trial found it to be faster.
    - ``verdict``: the times of the trial; ``unserved``: why calls fell back, or what was raised.
    """

    suite: str
    name: str
    mode: str
    batch: int
    eager: float = math.nan
    dispatched: float = math.nan
    aside: bool = False
    verdict: str = ""
    unserved: str = ""

    @property
    def ratio(self) -> float:
        return self.dispatched / self.eager

    def shown(self) -> str:
        """Return the result as one line of text."""
        times = f"{self.dispatched * 1e6:.1f} us, eager {self.eager * 1e6:.1f} us"
        by = " (own forward)" if self.aside else ""
        name = f"{self.suite}/{self.name}/{self.mode}/{self.batch}"
        return f"{name}: {self.ratio:.3f}: {times}{by} {self.unserved}".rstrip()


def _layer(name: str) -> Model:
    """Return a layer of torch.nn with PyTorch's first sample of it that is a batch."""
    info = next(i for i in INFOS if i.name == f"nn.{name}")
    options: Any = {"device": "cpu", "dtype": torch.float32, "requires_grad": False}
    for sample in info.module_inputs_func(info, training=True, **options):
        made, given = sample.constructor_input, sample.forward_input
        first = given.args[0] if given is not None and given.args else None
        if isinstance(first, torch.Tensor) and first.dim() > 1:
            assert given is not None
            module = info.module_cls(*made.args, **made.kwargs).float()
            return module, {"": given.args, **given.kwargs}
    raise ValueError(f"PyTorch has no sample of {name} that is a batch")


def _suites() -> dict[str, tuple[str, ...]]:
    return {
        "transformers": tuple(architectures()),
        "torchvision": tuple(SUITES["torchvision"]())[:_TORCHVISION],
        "layers": tuple(i.name.removeprefix("nn.") for i in INFOS),
    }


def _made(suite: str, name: str) -> Model:
    torch.manual_seed(0)
    return _layer(name) if suite == "layers" else SUITES[suite]()[name]()


def _call(model: nn.Module, sample: dict[str, Any]) -> Any:
    named = {key: value for key, value in sample.items() if key}
    return model(*sample.get("", ()), **named)


def _step(model: nn.Module, sample: dict[str, Any], training: bool) -> Callable[[], object]:
    """Return a function that calls the model, in training with a backward."""
    if not training:
        return lambda: _call(model, sample)
    torch.manual_seed(2)
    wanted = [t for t in tensors(_call(model, sample)) if t.requires_grad]
    cotangents = [torch.randn_like(t) for t in wanted]

    def step() -> None:
        model.zero_grad()
        found = [t for t in tensors(_call(model, sample)) if t.requires_grad]
        torch.autograd.backward(found, cotangents)

    return step


def measured(entry: Entry, batch: int, rounds: int, clock: Callable[[], float]) -> Line:
    """Measure a model with a batch of ``batch`` rows."""
    training = entry.mode == "training"
    model, sample = _made(entry.suite, entry.name)
    sample = with_rows(sample, batch)
    if training and not any(p.requires_grad for p in model.parameters()):
        first = next(t for t in tensors(sample) if t.is_floating_point())
        first.requires_grad_()
    model.train(training)
    dispatched = copy.deepcopy(model)
    add_tvm_dispatch(dispatched, on_fallback="silent")
    with torch.set_grad_enabled(training):
        theirs = _step(model, sample, training)
        theirs()
        ours = _step(dispatched, sample, training)
        for _ in range(_FIRST_CALLS - training):
            ours()
        ratios = [_in_turns(ours, theirs, rounds, clock)]
        while min(ratios)[0] > _BOUND and len(ratios) < _ATTEMPTS:
            ratios.append(_in_turns(ours, theirs, rounds, clock))
    report = dispatch_report(dispatched)
    verdicts = [s.verdict for s in report.specializations if s.verdict is not None]
    _, our_time, their_time = min(ratios)
    return Line(
        *entry,
        batch,
        their_time,
        our_time,
        bool(report.aside_calls),
        "; ".join(v.text() for v in verdicts),
        "; ".join(report.fallbacks),
    )


def _in_turns(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    clock: Callable[[], float],
) -> tuple[float, float, float]:
    """Return the ratio of the median seconds of two functions, and both medians."""
    started = clock()
    theirs()
    several = max(1, round(_LEAST_SECONDS / max(clock() - started, 1e-7)))

    def often(function: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(several):
                function()

        return run if several > 1 else function

    times = in_turns([often(ours), often(theirs)], rounds=rounds, warmup=1, clock=clock)
    a, b = (statistics.median(each) / several for each in times)
    return a / b, a, b


def _work(
    entry: Entry, batches: Sequence[int], chosen: argparse.Namespace, worker: int, out: Connection
) -> None:
    """Run in the child process: send a line for each batch."""
    warnings.filterwarnings("ignore")
    cores = sorted(os.sched_getaffinity(0))
    first = worker * chosen.threads % len(cores)
    os.sched_setaffinity(0, cores[first : first + chosen.threads])
    torch.set_num_threads(chosen.threads)
    os.environ[VARIABLE] = "1"  # modules of tests turn it off
    lines = []
    for batch in batches:
        try:
            lines.append(measured(entry, batch, chosen.rounds, _CLOCKS[chosen.clock]))
        except Exception as error:  # eager PyTorch refuses some layers with some batches
            text = f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            lines.append(Line(*entry, batch, unserved=text))
    out.send(lines)


def _run(chosen: argparse.Namespace, done: list[Line]) -> Iterator[Line]:
    entries = [
        Entry(suite, name, mode)
        for suite in chosen.suite
        for name in _suites()[suite]
        for mode in chosen.mode
        if not chosen.names or name in chosen.names
    ][chosen.shard]
    known = {(line.suite, line.name, line.mode, line.batch) for line in done}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tvmbridge", "tests.export.suites"])
    numbers, found, lock = itertools.count(), list[Line](), threading.Lock()

    def serve(taken: Iterator[Entry]) -> None:
        worker = next(numbers)
        for entry in taken:
            batches = [b for b in chosen.batch if (*entry, b) not in known]
            try:
                args = (entry, batches, chosen, worker)
                lines = run_alone(context, _work, args, chosen.timeout) if batches else []
            except Died as death:
                lines = [Line(*entry, b, unserved=f"not measured: {death}") for b in batches]
            with lock:
                for line in lines:
                    found.append(line)
                    print(line.shown(), flush=True)
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(asdict(line)) + "\n")

    in_threads(entries, serve, chosen.workers)
    yield from found


def main(argv: Sequence[str] = ()) -> int:
    """Measure, and print what is slower; return 1 if anything is."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.never_slower", description=__doc__)
    options.add_argument("names", nargs="*", help="models; all of the suites by default")
    suites = ("transformers", "torchvision", "layers")
    options.add_argument("--suite", nargs="+", choices=suites, default=list(suites))
    options.add_argument("--mode", nargs="+", choices=_MODES, default=list(_MODES))
    options.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    add_shard(options)
    options.add_argument("--workers", type=int, default=1, help="processes at once")
    options.add_argument("--threads", type=int, default=1, help="cores and threads of each process")
    options.add_argument("--rounds", type=int, default=40, help="timed calls of each side")
    options.add_argument("--clock", choices=_CLOCKS, default="wall")
    options.add_argument("--timeout", type=float, default=900.0, help="seconds of a model and mode")
    options.add_argument("--out", type=Path, default=Path("build/never_slower.jsonl"))
    options.add_argument("--resume", action="store_true", help="keep what the file has")
    chosen = options.parse_args(list(argv))
    unknown = set(chosen.names) - {n for suite in chosen.suite for n in _suites()[suite]}
    if unknown:
        options.error(f"no such models: {', '.join(sorted(unknown))}")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if not chosen.resume:
        chosen.out.unlink(missing_ok=True)
    kept = chosen.out.read_text().splitlines() if chosen.out.exists() else []
    done = [Line(**json.loads(line)) for line in kept]
    done += _run(chosen, done)
    timed = [line for line in done if not math.isnan(line.ratio)]
    slower = sorted((x for x in timed if x.ratio > _BOUND), key=lambda x: -x.ratio)
    print(
        f"{len(timed)} measured, {len(done) - len(timed)} not; "
        f"the own forward serves {sum(x.aside for x in timed)}; slower than {_BOUND}: {len(slower)}"
    )
    for line in slower:
        print(f"  {line.shown()}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
