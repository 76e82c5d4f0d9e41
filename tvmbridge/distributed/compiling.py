"""Compile the stages of a pipeline: equal stages once, and none whose equal was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.backends import is_on_host
from tvmbridge.core.errors import BridgeError, first_line
from tvmbridge.dispatch import add_tvm_dispatch, codes_of, remove_tvm_dispatch
from tvmbridge.distributed.control import Control
from tvmbridge.distributed.measuring import sample_of
from tvmbridge.distributed.splitting import StageModule


@dataclass(frozen=True)
class CompileSettings:
    """How the stages of a pipeline are compiled.

    - ``options``, ``target``: as for :func:`tvmbridge.add_tvm_dispatch`.
    - ``halves``: whether the schedule separates the gradients of inputs and of weights.
    """

    options: Any
    target: Any
    halves: bool


def compile_stages(
    own: Sequence[StageModule],
    leaves: Sequence[Any],
    device: torch.device,
    control: Control,
    settings: CompileSettings,
) -> tuple[dict[int, str], dict[int, int]]:
    """Dispatch the stages of this rank.

    On the CPU the first of equal stages is compiled first, so that the others find its code in
    the cache, if the cache is on. If one rank refuses a stage, it and all stages equal to it run
    in eager PyTorch.

    Returns:
        The reasons of all stages that run in eager PyTorch, and for each stage the first stage
        that is equal to it.
    """
    keys = control.gather({s.index: s.key for s in own}, "to compare the stages")
    merged = {index: key for part in keys for index, key in part.items()}
    firsts = _firsts(merged)
    reasons: dict[int, str] = {}
    for turn in _turns(own, firsts, device):
        refused = {}
        for stage in turn:
            if firsts[stage.index] not in reasons:
                refused.update(_refusal(stage, leaves, device, settings))
        for part in control.gather(refused, "to compile the stages"):
            reasons.update(part)
    for index in merged:
        equal = [other for other in reasons if firsts[other] == firsts[index]]
        if equal and index not in reasons:
            reasons[index] = f"as stage {equal[0]}, which is equal: {reasons[equal[0]]}"
    for stage in own:
        if stage.index in reasons and "forward" in stage.module.__dict__:
            remove_tvm_dispatch(stage.module)
    return reasons, firsts


def _firsts(keys: Mapping[int, str]) -> dict[int, int]:
    first_of: dict[str, int] = {}
    return {index: first_of.setdefault(key, index) for index, key in sorted(keys.items())}


def _turns(
    own: Sequence[StageModule], firsts: Mapping[int, int], device: torch.device
) -> tuple[list[StageModule], list[StageModule]]:
    """Return the stages to compile at once, and those to compile after every rank's first ones."""
    if not is_on_host(device):
        return list(own), []  # Waiting would save the build alone: each rank captures by itself.
    first = [s for s in own if firsts[s.index] == s.index]
    return first, [s for s in own if firsts[s.index] != s.index]


def _refusal(
    stage: StageModule, leaves: Sequence[Any], device: torch.device, settings: CompileSettings
) -> dict[int, str]:
    """Dispatch one stage; return its number and the reason if it is refused."""
    given = [leaves[i] for i in stage.used_inputs]
    try:
        sample = (*sample_of(stage, device), *given)
        add_tvm_dispatch(stage.module, sample, target=settings.target, options=settings.options)
        if settings.halves:
            _compile_halves(stage)
    except BridgeError as error:
        return {stage.index: f"{type(error).__name__}: {first_line(error)}"}
    return {}


def _compile_halves(stage: StageModule) -> None:
    """Compile the gradients of inputs and of weights separately, before a rank waits for others."""
    for code in codes_of(stage.module).values():
        for specialization in code.policy.specializations():
            for _, entry in specialization.compiled():
                if entry.training is not None and entry.training.halves is not None:
                    entry.training.halves.compile()
