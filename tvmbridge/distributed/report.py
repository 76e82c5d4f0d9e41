"""The report of a pipeline: which of its stages TVM serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tvmbridge.core.text_console import text_console
from tvmbridge.dispatch import dispatch_report
from tvmbridge.distributed.control import Control
from tvmbridge.distributed.splitting import StageModule


@dataclass(frozen=True)
class StageReport:
    """One stage: the calls that TVM served, and why the others ran in eager PyTorch.

    ``cache`` says whether the code came from the cache on disk. ``fallbacks`` counts the calls of
    the stage's own forward by reason. ``halves`` counts the runs of backward that computed the
    gradients of ``inputs`` or of ``weights`` alone, see :class:`SpecializationReport`.
    """

    stage: int
    rank: int
    device: str
    equal_to: int
    eager: str | None
    tvm_calls: int
    fallbacks: dict[str, int]
    cache: tuple[str, ...]
    halves: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineReport:
    """The reports of all stages, in order."""

    stages: tuple[StageReport, ...]

    @property
    def share(self) -> float:
        """The share of the stages' calls that TVM served; 0 before the first call."""
        served = sum(s.tvm_calls for s in self.stages)
        calls = served + sum(sum(s.fallbacks.values()) for s in self.stages)
        return served / calls if calls else 0.0

    def __str__(self) -> str:
        from rich.markup import escape
        from rich.table import Table

        console = text_console()
        table = Table("stage", "rank", "device", "runs on", "calls by TVM", "others", "code")
        for s in self.stages:
            equal = f", as stage {s.equal_to}" if s.equal_to != s.stage else ""
            runs = f"TVM{equal}" if s.eager is None else f"PyTorch: {s.eager}"
            others = str(sum(s.fallbacks.values()))
            row = (str(s.stage), str(s.rank), s.device, escape(runs), str(s.tvm_calls), others)
            table.add_row(
                *row, escape(", ".join(dict.fromkeys(c.partition(":")[0] for c in s.cache)))
            )
        console.print(table)
        for s in self.stages:
            for reason, count in s.fallbacks.items():
                console.print(f"stage {s.stage}: {count} calls in PyTorch, because {reason}")
        return console.file.getvalue()


def report_of(
    stages: Sequence[StageModule],
    reasons: Mapping[int, str],
    equal_to: Mapping[int, int],
    device: torch.device,
    control: Control,
) -> PipelineReport:
    """Collect the reports of the stages from all ranks; all ranks call it together."""
    mine = []
    for stage in stages:
        eager = reasons.get(stage.index)
        served, fallbacks = 0, dict[str, int]()
        cache: tuple[str, ...] = ()
        halves: Counter[str] = Counter()
        if eager is None:
            told = dispatch_report(stage.module)
            served, fallbacks = told.tvm_calls, dict(told.fallbacks)
            cache = tuple(s.cache for s in told.specializations)
            for specialization in told.specializations:
                halves.update(specialization.backward_halves)
        mine.append(
            StageReport(
                stage=stage.index,
                rank=control.rank,
                device=str(device),
                equal_to=equal_to[stage.index],
                eager=eager,
                tvm_calls=served,
                fallbacks=fallbacks,
                cache=cache,
                halves=dict(halves),
            )
        )
    parts = control.gather(mine, "for their reports")
    found = sorted((s for part in parts for s in part), key=lambda s: s.stage)
    return PipelineReport(tuple(found))
