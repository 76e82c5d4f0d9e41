"""Times of calls on a GPU: eager PyTorch, torch.compile and tvmbridge, in turns in one run.

Times are medians between CUDA events, each over enough calls to take a few milliseconds. The table
also has the seconds to the first result, and the relative errors of tvmbridge and of eager PyTorch
against float64, without dropout.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.common import parser
from benchmarks.gpu_cases import Case, cases_by_name
from tests.gpu.helpers import errors, result_of
from tvmbridge import add_tvm_dispatch, dispatch_report

DROPOUT = 0.1
TVM = "tvmbridge"
COMPILED = {"default": "default", "reduce": "reduce-overhead", "max": "max-autotune"}


@dataclass
class Figures:
    """The measurements of a row.

    - ``milliseconds``, ``seconds``: of a call, and to the first result, by candidate.
    - ``failed``: why a candidate or a measurement failed.
    - ``error``, ``eager_error``: the worst relative error of tvmbridge and of eager PyTorch.
    """

    milliseconds: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    error: float = math.nan
    eager_error: float = math.nan

    @property
    def ratio(self) -> float:
        """Return the time of tvmbridge over the time of the best other candidate."""
        others = [ms for name, ms in self.milliseconds.items() if name != TVM]
        return self.milliseconds.get(TVM, math.nan) / min(others, default=math.nan)


def _call(module: nn.Module, x: torch.Tensor, *, train: bool) -> Callable[[], None]:
    """Return a function that runs one inference, or forward and backward with all gradients."""

    def infer() -> None:
        with torch.no_grad():
            module(x)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        output = result_of(module(x))
        output.backward(torch.ones_like(output))

    return step if train else infer


def _marked(call: Callable[[], None]) -> Callable[[], None]:
    """Mark each call as a new step, so that CUDA graphs may overwrite the last call's results."""

    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        call()

    return marked


def _candidates(
    case: Case, modes: Sequence[str], figures: Figures
) -> dict[str, Callable[[], None]]:
    """Compile and warm up each candidate, and return its call; record failures in ``figures``."""
    calls: dict[str, Callable[[], None]] = {}
    for name in ("eager", *modes, TVM):
        module, x = case.module(DROPOUT), case.sample()
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            if name == TVM:
                with torch.set_grad_enabled(case.train):
                    add_tvm_dispatch(module, x.detach().clone().requires_grad_(x.requires_grad))
            elif name in COMPILED:
                module.compile(mode=COMPILED[name])
            call = _call(module, x, train=case.train)
            call = _marked(call) if name in COMPILED else call
            call()
            torch.cuda.synchronize()
            figures.seconds[name] = time.perf_counter() - start
            for _ in range(5):
                call()
            if name == TVM and (fallbacks := dispatch_report(module).fallbacks):
                raise RuntimeError(f"calls were left to eager PyTorch: {fallbacks}")
        except Exception as error:
            figures.failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
            traceback.print_exc()
        else:
            calls[name] = call
    return calls


def _timed(call: Callable[[], None], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def _alternate(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Call the functions in turns, and return the median milliseconds of each."""
    counts = {name: max(3, int(5 / max(_timed(call, 3), 1e-3))) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            milliseconds = _timed(call, counts[name])
            if number:
                taken[name].append(milliseconds)
    return {name: statistics.median(each) for name, each in taken.items()}


def _values(module: nn.Module, x: torch.Tensor, *, train: bool) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(train):
        output = result_of(module(x))
    values = {"output": output.detach().clone()}
    if train:
        generator = torch.Generator("cuda").manual_seed(3)
        weights = torch.randn(output.shape, device="cuda", generator=generator).bfloat16()
        output.backward(weights.to(output.dtype))
        assert x.grad is not None
        values["input"] = x.grad
        values |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return values


def _worst_errors(case: Case) -> tuple[float, float]:
    """Return the worst error of output and gradients against float64, of tvmbridge and eager."""
    eager, x = case.module(0.0), case.sample()
    exact, tvm = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    doubled = x.detach().double() if x.is_floating_point() else x
    doubled.requires_grad_(x.requires_grad)
    with torch.set_grad_enabled(case.train):
        add_tvm_dispatch(tvm, x.detach().clone().requires_grad_(x.requires_grad))
    truth = _values(exact, doubled, train=case.train)
    for _ in range(5):  # the last call replays a CUDA graph
        found = _values(tvm, x, train=case.train)
    expected = _values(eager, x, train=case.train)
    ours, theirs = (errors(values, truth) for values in (found, expected))
    return max(ours.values()), max(theirs.values())


def measure(case: Case, modes: Sequence[str], rounds: int) -> Figures:
    """Measure a row; record failures, and go on with the other measurements."""
    figures = Figures()
    torch._dynamo.reset()
    try:
        figures.milliseconds = _alternate(_candidates(case, modes, figures), rounds)
    except Exception as error:
        figures.failed["timing"] = f"{type(error).__name__}: {str(error)[:200]}"
        traceback.print_exc()
    try:
        figures.error, figures.eager_error = _worst_errors(case)
    except Exception as error:
        figures.failed["errors"] = f"{type(error).__name__}: {str(error)[:200]}"
        traceback.print_exc()
    torch.cuda.empty_cache()
    return figures


def _print(names: Sequence[str], results: dict[str, Figures], cases: dict[str, Case]) -> None:
    heads = [f"{name} ms (s)" for name in names]
    title = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    table = Table("", *heads, "of best", "bound", "error", "eager's", title=title)
    for row, figures in results.items():
        cells = [
            f"{figures.milliseconds[n]:.3f} ({figures.seconds[n]:.0f})"
            if n in figures.milliseconds
            else "-"
            for n in names
        ]
        worst = f"{figures.error:.1e}", f"{figures.eager_error:.1e}"
        table.add_row(row, *cells, f"{figures.ratio:.2f}", f"{cases[row].bound:.2f}", *worst)
    Console(width=150).print(table)
    for row, figures in results.items():
        for name, why in figures.failed.items():
            print(f"{row}, {name} failed: {why}")


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen rows; print each as soon as it is measured."""
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", default=[""], help="rows whose names contain one")
    options.add_argument("--quick", action="store_true", help="a few repeats")
    options.add_argument("--max-autotune", action="store_true", help="this mode too (minutes)")
    chosen = options.parse_args(list(argv))
    if not torch.cuda.is_available():
        print("there is no GPU that PyTorch can use")
        return 0
    cases = {n: c for n, c in cases_by_name().items() if any(part in n for part in chosen.rows)}
    modes = [name for name in COMPILED if name != "max" or chosen.max_autotune]
    results = {}
    for name, case in cases.items():
        figures = results[name] = measure(case, modes, 5 if chosen.quick else 25)
        times = {n: round(ms, 4) for n, ms in figures.milliseconds.items()}
        print(f"{name}: {times} of best {figures.ratio:.2f}", flush=True)
    _print(["eager", *modes, TVM], results, cases)
    fast = all(f.ratio <= cases[name].bound for name, f in results.items())
    right = all(f.error <= 2 * f.eager_error for f in results.values())
    return int(not chosen.no_check and not (fast and right))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
