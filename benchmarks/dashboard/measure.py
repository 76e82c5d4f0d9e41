"""Measure one model by each peer in this process, and print accuracy, times and memory as JSON."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.common import in_turns
from benchmarks.dashboard.accuracy import differing
from benchmarks.dashboard.models import entries, make, moved
from benchmarks.dashboard.turns import turn
from tvmbridge import add_tvm_dispatch, compile_report, dispatch_report

PEERS = ("eager", "inductor", "reduce-overhead", "max-autotune", "tvmbridge", "tvmbridge-compile")
OURS = PEERS[-2:]
_WARM, _COUNTED = 3, 6
# If a garbage collection frees no more objects than this, no further one is needed.
_FEW = 100


@dataclass(frozen=True)
class Task:
    """The work of one process: a model of a suite, its mode and device, and the peers.

    - ``scale``: ``"tiny"`` for small configurations, otherwise the published sizes.
    - ``amp``: whether calls run under autocast to bfloat16.
    - ``rounds``: timed calls of each peer; 0 measures no times.
    - ``shared``: whether other processes measure too; times are then taken in a turn
      (:mod:`benchmarks.dashboard.turns`).
    """

    suite: str
    name: str
    mode: str
    device: str
    scale: str
    batch: int
    amp: bool
    dtype: str
    peers: tuple[str, ...]
    rounds: int
    shared: bool

    @property
    def training(self) -> bool:
        """Whether a step has a backward."""
        return self.mode == "training"

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key that identifies a measurement in the file of results."""
        return (self.suite, self.name, self.mode, self.device, self.scale, self.amp, self.dtype)


class _Step:
    """A call of a model, with its backward in training."""

    def __init__(self, task: Task, model: nn.Module, given: dict[str, Any]) -> None:
        self.task, self.model, self.given = task, model, given

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Set the gradient mode, and autocast if ``amp`` is set, for a call inside."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.task.training))
            if self.task.amp:
                stack.enter_context(torch.autocast(self.task.device, torch.bfloat16))
            yield

    def __call__(self) -> Any:
        if self.task.training:
            self.model.zero_grad(set_to_none=True)
        with self.surroundings():
            output = self.model(**self.given)
        if self.task.training:
            _loss(output).backward()
        return output

    def values(self) -> dict[str, torch.Tensor]:
        """Return the results of a call and all gradients, copied to the CPU."""
        torch.manual_seed(7)
        output = self()
        if isinstance(output, torch.Tensor):
            found = {"output": output}
        else:
            found = {k: v for k, v in dict(output).items() if isinstance(v, torch.Tensor)}
            if self.task.name.endswith("QuestionAnswering"):
                found = {"loss": found["loss"]}
        for name, parameter in self.model.named_parameters():
            if self.task.training and parameter.grad is not None:
                found[f"gradient of {name.replace('_orig_mod.', '')}"] = parameter.grad
        return {name: value.detach().cpu().clone() for name, value in found.items()}


def measure(task: Task) -> dict[str, Any]:
    """Return the record of a model, with results by peer, or ``error`` if eager PyTorch fails."""
    entry = entries(task.suite)[task.name]
    model, given = make(entry, task.training, task.scale, task.batch)
    tolerance = entry.bound(task.training)
    record: dict[str, Any] = {**asdict(task), "torch": torch.__version__, "results": {}}
    record["transformers"] = version("transformers")
    del record["shared"], record["peers"]
    dtype = getattr(torch, task.dtype)
    eager = _Step(task, *_placed(task, model, given, dtype))
    try:
        reference = eager.values()
    except Exception as error:
        return {**record, "error": _said(error)}
    exact = _exact(task, model, given)
    record["float64"] = exact is not None
    _report(record)
    for peer in task.peers:
        _clear(task.device)
        try:
            step = _Step(task, *_placed(task, model, given, dtype))
            found = _of_peer(step, peer, eager)
            found["wrong"] = differing(exact, reference, step.values(), tolerance)
        except Exception as error:
            found = {"failed": _said(error)}
        found["passed"] = not found.get("failed") and found.get("wrong") is None
        record["results"][peer] = found
        _report(record)
        step = None  # Free its memory, which would count for the next peer.
    return record


def _report(record: dict[str, Any]) -> None:
    """Print the record so far, because the process may run out of time."""
    print(json.dumps(record), flush=True)


def _of_peer(step: _Step, peer: str, eager: _Step) -> dict[str, Any]:
    device, dispatched = step.task.device, step.model
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step.model = _prepared(step, peer)
    step()
    _wait(device)
    found: dict[str, Any] = {"first": time.perf_counter() - start}
    for _ in range(_WARM - 1):
        step()
    if peer in OURS:
        before = _served(peer, dispatched)
        for _ in range(_COUNTED):
            step()
        after = _served(peer, dispatched)
        served, asked = after[0] - before[0], after[1] - before[1]
        found["served"], found["reasons"] = served / max(asked, 1), after[2]
    if device == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
    if step.task.rounds:
        with turn(step.task.shared):
            pair: list[Callable[[], object]] = [_timed(eager), _timed(step)]
            seconds = in_turns(pair, rounds=step.task.rounds)
        found["eager"], found["seconds"] = map(statistics.median, seconds)
    return found


def _prepared(step: _Step, peer: str) -> Any:
    """Return the model compiled by the peer."""
    torch._dynamo.reset()
    if peer == "eager":
        return step.model
    if peer == "tvmbridge":
        with step.surroundings():
            return add_tvm_dispatch(step.model, (), sample_kwargs=step.given)
    if peer == "tvmbridge-compile":
        return torch.compile(step.model, backend="tvmbridge")
    return torch.compile(step.model, mode=None if peer == "inductor" else peer)


def _served(peer: str, model: nn.Module) -> tuple[int, int, list[str]]:
    """Return the calls that compiled code served, all calls, and why calls were not served."""
    if peer == "tvmbridge":
        report = dispatch_report(model)
        missed = sum(report.fallbacks.values())
        reasons = [report.examples.get(reason, reason) for reason in report.fallbacks]
        return report.tvm_calls, report.tvm_calls + missed, reasons
    graphs = compile_report()
    calls, missed = graphs.calls
    reasons = [reason for g in graphs.graphs if not g.small for reason in g.eager_calls]
    return calls, calls + missed, [*reasons, *(f"graph break: {b}" for b in graphs.breaks)]


def _placed(
    task: Task, model: nn.Module, given: dict[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    return copy.deepcopy(model).to(task.device, dtype), moved(given, task.device, dtype)


def _exact(task: Task, model: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the results in float64; None if the model cannot run in it."""
    plain = Task(**{**asdict(task), "amp": False})
    try:
        return _Step(plain, *_placed(task, model, given, torch.float64)).values()
    except Exception:
        return None


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
    return loss


def _timed(step: _Step) -> Callable[[], object]:
    def call() -> None:
        step()
        _wait(step.task.device)

    return call


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _clear(device: str) -> None:
    while gc.collect() > _FEW:  # what one pass frees may hold more, through objects of C++
        pass
    if device == "cuda":
        torch.cuda.empty_cache()


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _end_with(parent: int) -> None:
    """End this process and its compilers once the process that started it has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    _given = json.loads(sys.argv[1])
    _record = measure(Task(**{**_given, "peers": tuple(_given["peers"])}))
    print(json.dumps({**_record, "done": True}), flush=True)
