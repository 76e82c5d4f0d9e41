"""The public functions of tuning."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from tvm.target import Target

from tvmbridge.backends import resolve_target
from tvmbridge.calls.standins import anything_requires_grad
from tvmbridge.compiler.build import fuse
from tvmbridge.compiler.laying_out import lay_out_functions
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import PassRecord
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.records import Folder, Task, count_tasks
from tvmbridge.records.pending import read_pending, remove_pending
from tvmbridge.records.tasks import count_calls
from tvmbridge.runtime.dispatcher import code_of
from tvmbridge.runtime.guards.forwards import with_own_forward
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.tuning.run import Clock, TaskOutcome, Tuner

logger = logging.getLogger(__name__)

DEFAULT_LOG_DIR = "tuning_logs"


@dataclass(frozen=True)
class Limits:
    """The limits of a tuning run.

    - ``trials``: the number of candidates for each task; None: by the size of the task.
    - ``timeout``: seconds for the whole run; None: no limit.

    Raises:
        ValueError: a limit is not positive.
    """

    trials: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise ValueError(f"trials must be at least 1, not {self.trials}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, not {self.timeout}")


@dataclass(frozen=True)
class TuningReport:
    """The results of a tuning run.

    - ``folder``: the folder of the target, with the records.
    - ``outcomes``: the result of each task, with its number of calls.
    - ``external``: the number of calls of PyTorch's kernels, which are not tuned.
    """

    folder: Path
    outcomes: tuple[TaskOutcome, ...]
    external: int

    @property
    def tuned(self) -> int:
        """The number of tasks whose best record is faster than the kernel by rule."""
        return sum(o.verdict is not None and o.verdict.applies for o in self.outcomes)

    @property
    def unfinished(self) -> int:
        """The number of tasks that the run had no time for."""
        return sum(o.verdict is None for o in self.outcomes)

    @property
    def saved_seconds(self) -> float:
        """Seconds that the records save in one call of the module, from the measured times."""
        saved = 0.0
        for o in self.outcomes:
            if o.verdict is not None and o.verdict.applies:
                saved += o.weight * ((o.verdict.rule_seconds or 0) - (o.verdict.seconds or 0))
        return saved

    def __str__(self) -> str:
        lines = [str(outcome) for outcome in self.outcomes]
        lines.append(
            f"{len(self.outcomes)} tasks: {self.tuned} faster by a record than by rule, "
            f"{self.unfinished} without time; {self.external} external kernels"
        )
        lines.append(f"saved in a call: {self.saved_seconds * 1e6:.0f} µs; records: {self.folder}")
        return "\n".join(lines)


def tune(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR,
    trials: int | None = None,
    timeout: float | None = None,
    options: CompileOptions | dict[str, Any] | None = None,
) -> TuningReport:
    """Search for faster schedules of the kernels that ``module`` compiles to, and store them.

    MetaSchedule proposes candidates. A separate process compiles each candidate, checks it against
    the kernel that is used without a record, and measures it. The results are written to
    ``log_dir/<target>/`` after each batch: an interrupted run loses at most one batch, and the next
    run continues from there. See docs/tuning.md for how compilation finds the records.

    Args:
        module: in train mode, forward and backward are tuned; in eval mode, forward alone.
        sample_input: a tensor, or a tuple of positional arguments.
        sample_kwargs: keyword arguments of forward.
        target: as for :func:`add_tvm_dispatch`; this machine must be able to run its code.
        log_dir: the directory of the records.
        trials: how many candidates to measure for each task, earlier runs included; None: by the
            size of the task.
        timeout: seconds for the whole run; None: no limit.
        options: as for :func:`add_tvm_dispatch`.

    Returns:
        A report with the result of each task.

    Raises:
        TypeError, ValueError: an argument cannot be used.
        BridgeError: the module cannot be compiled, the directory cannot be written or has records
            of another TVM version, or a package that tuning needs is missing.
    """
    limits = Limits(trials, timeout)
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    return _tune_modules([(module, args, kwargs)], log_dir, target, limits, options)


def tune_all(
    samples: Sequence[tuple[nn.Module, Any]],
    log_dir: str | os.PathLike[str],
    target: Any,
    limits: Limits,
) -> TuningReport:
    """Tune the tasks of several modules, given as pairs of module and sample input, in one run."""
    modules = [(module, *normalize_sample(sample, None)) for module, sample in samples]
    return _tune_modules(modules, log_dir, target, limits, None)


def _tune_modules(
    modules: Sequence[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]],
    log_dir: str | os.PathLike[str],
    target: Any,
    limits: Limits,
    options: CompileOptions | dict[str, Any] | None,
) -> TuningReport:
    clock = Clock(limits.timeout)
    tasks: Counter[Task] = Counter()
    external = 0
    for module, args, kwargs in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        found, kernels, resolved = module_tasks(
            module, args, kwargs, target=target, options=CompileOptions.of(options)
        )
        tasks.update(found)
        external += kernels
    folder = Folder.below(Path(log_dir), resolved)
    outcomes = tune_tasks(folder, tasks, limits.trials, clock)
    return TuningReport(folder.path, tuple(outcomes), external)


def tune_pending(
    log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR,
    *,
    target: Any = None,
    trials: int | None = None,
    timeout: float | None = None,
) -> TuningReport:
    """Tune the tasks that compilation has listed in ``log_dir`` for this target.

    Arguments and errors are as for :func:`tune`. Finished tasks are removed from the list.
    """
    limits = Limits(trials, timeout)
    folder = Folder.below(Path(log_dir), resolve_target(target))
    pending = read_pending(folder)
    tasks = {p.task: p.weight for p in pending}
    outcomes = tune_tasks(folder, tasks, limits.trials, Clock(limits.timeout)) if tasks else []
    if tasks:
        remove_pending(folder, (o.task for o in outcomes if o.done))
    return TuningReport(folder.path, tuple(outcomes), 0)


def tune_tasks(
    folder: Folder, tasks: Mapping[Task, int], trials: int | None, clock: Clock
) -> list[TaskOutcome]:
    """Tune ``tasks``, write the records to ``folder``, and show the progress on a terminal."""
    folder.open_for_writing()
    logger.info("%d tasks for %s", len(tasks), folder.path)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.completed:.0f}/{task.total:.0f} trials"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        tuner = Tuner(folder, trials, clock, bar)
        try:
            return tuner.run(tasks)
        finally:
            tuner.close()


def module_tasks(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    target: Any,
    options: CompileOptions,
) -> tuple[dict[Task, int], int, Target]:
    """Return a module's tasks with their numbers of calls, its external calls, and the target.

    Tasks are from forward and backward if the module is in train mode and anything requires a
    gradient; otherwise from forward alone.
    """
    needs_grad = module.training and anything_requires_grad(module, (args, dict(kwargs)))
    records: list[PassRecord] = []
    installed = module.__dict__.get("forward")
    code = code_of(installed, ModuleCode)
    packing = ModulePacks(module) if code is None else code.packing
    own_forward = nullcontext() if code is None else with_own_forward(module, code.original)
    with compiling(), tracing_here(), own_forward:
        lowered = lower_module(
            CompileRequest(
                module,
                args,
                kwargs,
                needs_grad=needs_grad,
                target=target,
                options=options,
                packing=packing,
            ),
            records=records,
        )
    mod, _ = lay_out_functions(lowered.mod, lowered.split, lowered.layouts, records)
    mod = fuse(mod, lowered.target, records, measure=options.measure_kernels)
    return count_tasks(mod), count_calls(mod)[""], lowered.target
