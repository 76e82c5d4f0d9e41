"""MetaSchedule's search for schedules of one function; this module runs in a worker process.

TVM's rules for CPUs fix the number of parallel parts of a loop and the width of vectors. The best
choice depends on the kernel (small ones are faster on one thread). So the design space is the union
of the spaces that the rules give for several choices.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvmbridge.records.allowed import scheduled_by

# Parallel parts per core (-1: one thread), the largest vectorised extent, and whether reductions
# are tiled.
_SPACES = (
    (16, 64, False),
    (4, 32, False),
    (1, 16, False),
    (-1, 64, False),
    (-1, 16, False),
    (16, 64, True),
)
History = Sequence[tuple[Any, list[float]]]
_POPULATION = 128
_GENERATIONS = 3
_FRESH = 16


@dataclass
class _Search:
    context: ms.TuneContext
    cost_model: ms.CostModel
    database: ms.database.Database
    workload: ms.database.Workload
    target: Target
    proposed: Sequence[Any] = ()


_search: _Search | None = None


def start(module: str, target: str, history: History, trials: int, batch: int, seed: int) -> None:
    """Begin the search for one function.

    Args:
        history: the traces of earlier records, with their times in seconds.
        batch: the number of candidates in a batch.
    """
    global _search
    _leave_out_intrinsics()
    resolved, mod = Target(target), tvm.ir.load_json(module)
    threads = int(resolved.attrs.get("num-cores", 1))
    context = ms.TuneContext(
        mod,
        target=resolved,
        space_generator=_space(*_SPACES[0]),
        search_strategy=ms.search_strategy.EvolutionarySearch(
            population_size=_POPULATION,
            init_min_unmeasured=_FRESH,
            genetic_num_iters=_GENERATIONS,
        ),
        num_threads=threads,
        rand_state=seed,
    )
    spaces = _design_spaces(mod, resolved, threads)
    database = ms.database.MemoryDatabase()
    _search = _Search(
        context, _cost_model(threads), database, database.commit_workload(mod), resolved
    )
    for trace, seconds in history:
        _commit(scheduled_by(_search.workload.mod, trace).trace, seconds)
    context.pre_tuning(trials, batch, spaces, database, _search.cost_model)


def propose() -> list[tuple[str, Any, Any]]:
    """Return the next batch of candidates, each as the JSON of module, trace and arguments.

    The list is empty when the search has nothing left to propose.
    """
    search = _running()
    search.proposed = list(search.context.generate_measure_candidates() or ())
    return [
        (
            tvm.ir.save_json(candidate.sch.mod),
            _plain(candidate.sch.trace.as_json()),
            [_plain(info.as_json()) for info in candidate.args_info],
        )
        for candidate in search.proposed
    ]


def learn(seconds: Sequence[Sequence[float]]) -> None:
    """Report the times of the proposed candidates to the search; an empty list is a failure."""
    search = _running()
    results = [
        ms.runner.RunnerResult(list(s), None) if s else ms.runner.RunnerResult(None, "failed")
        for s in seconds
    ]
    search.context.notify_runner_results(search.proposed, results)
    search.cost_model.update(search.context, search.proposed, results)
    for candidate, run in zip(search.proposed, seconds, strict=True):
        if run:
            _commit(candidate.sch.trace, run)


def _running() -> _Search:
    if _search is None:
        raise RuntimeError("start was not called in this process")
    return _search


def _commit(trace: Any, seconds: Sequence[float]) -> None:
    search = _running()
    search.database.commit_tuning_record(
        ms.database.TuningRecord(trace, search.workload, list(seconds), search.target, None)
    )


def _cost_model(threads: int) -> ms.CostModel:
    try:
        return ms.cost_model.XGBModel(num_tuning_cores=threads)
    except ImportError:
        return ms.cost_model.RandomModel()


def _leave_out_intrinsics() -> None:
    """Prevent the import of TVM's tensor intrinsics, which every TuneContext triggers.

    The import reads sources through ``inspect``, which takes a minute or more once PyTorch is
    loaded. The rules here use no tensor intrinsics.
    """
    name = "tvm.s_tir.tensor_intrin"
    sys.modules.setdefault(name, types.ModuleType(name))


def _design_spaces(mod: tvm.IRModule, target: Target, threads: int) -> list[tvm.s_tir.Schedule]:
    """Return the union of the design spaces of all choices.

    If a rule raises for a function that it does not expect, only the space of that choice is lost.

    Raises:
        RuntimeError: no choice gives a design space.
    """
    spaces: list[tvm.s_tir.Schedule] = []
    failure: Exception | None = None
    for choice in _SPACES:
        context = ms.TuneContext(
            mod, target=target, space_generator=_space(*choice), num_threads=threads
        )
        try:
            spaces += context.generate_design_space()
        except Exception as error:
            failure = error
    if not spaces:
        raise RuntimeError("no rule gives a design space") from failure
    return spaces


def _space(jobs: int, lanes: int, tiled: bool) -> ms.space_generator.PostOrderApply:
    rules = ms.schedule_rule
    tiling = rules.MultiLevelTiling(
        structure="SSRSRS",
        max_innermost_factor=64,
        reuse_write=rules.ReuseType(req="may", levels=[1, 2], scope="global"),
    )
    return ms.space_generator.PostOrderApply(
        sch_rules=[
            rules.InlineConstantScalars(),
            rules.AutoInline(
                into_producer=False,
                into_consumer=True,
                inline_const_tensor=True,
                disallow_if_then_else=True,
                require_injective=True,
                require_ordered=True,
                disallow_op=["tirx.exp"],
            ),
            rules.AddRFactor(max_jobs_per_core=max(1, jobs), max_innermost_factor=lanes),
            *([tiling] if tiled else []),
            rules.ParallelizeVectorizeUnroll(
                max_jobs_per_core=jobs,
                max_vectorize_extent=lanes,
                unroll_max_steps=[0, 16, 64, 512],
                unroll_explicit=True,
            ),
            rules.RandomComputeLocation(),
        ],
        postprocs=[
            ms.postproc.DisallowDynamicLoop(),
            ms.postproc.RewriteParallelVectorizeUnroll(),
            ms.postproc.RewriteReductionBlock(),
        ],
        mutator_probs={
            ms.mutator.MutateTileSize(): 0.9,
            ms.mutator.MutateComputeLocation(): 0.05,
            ms.mutator.MutateUnroll(): 0.05,
        },
    )


def _plain(value: Any) -> Any:
    """Convert TVM's containers and numbers to plain Python values."""
    if isinstance(value, (tvm.ir.Array, tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
        return value.value
    return str(value) if isinstance(value, str) else value
