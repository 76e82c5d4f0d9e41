"""Stages compiled by TVM, as all ranks agree: equal ones once, and eager where one is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.errors import BridgeError, first_line
from tvmbridge.dispatch import add_tvm_dispatch, remove_tvm_dispatch
from tvmbridge.distributed.control import Control
from tvmbridge.distributed.measuring import sample_of
from tvmbridge.distributed.splitting import StageModule


def compile_stages(
    own: Sequence[StageModule],
    leaves: Sequence[Any],
    device: torch.device,
    control: Control,
    options: Any,
    target: Any,
) -> tuple[dict[int, str], dict[int, int]]:
    """Dispatch the stages of this rank; what was refused, and which stages are equal.

    On the CPU the first of equal stages is compiled first: the others find its code in the cache,
    where that is on. A stage that one rank refuses runs in eager PyTorch, and so do those equal to
    it.

    Returns:
        The reasons of all stages that run in eager PyTorch, and of each stage the first that is
        equal to it.
    """
    keys = control.gather({s.index: s.key for s in own}, "to compare the stages")
    merged = {index: key for part in keys for index, key in part.items()}
    firsts = _firsts(merged)
    reasons: dict[int, str] = {}
    for turn in _turns(own, firsts, device):
        refused = {}
        for stage in turn:
            if firsts[stage.index] not in reasons:
                refused.update(_refusal(stage, leaves, device, options, target))
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
    """The stages that are compiled at once, and those that wait until every rank is through."""
    if device.type != "cpu":
        return list(own), []  # Most of the time is capture, which each rank does for itself.
    first = [s for s in own if firsts[s.index] == s.index]
    return first, [s for s in own if firsts[s.index] != s.index]


def _refusal(
    stage: StageModule, leaves: Sequence[Any], device: torch.device, options: Any, target: Any
) -> dict[int, str]:
    """Dispatch one stage; its number and the reason where it is refused."""
    given = [leaves[i] for i in stage.used_inputs]
    try:
        sample = (*sample_of(stage, device), *given)
        add_tvm_dispatch(stage.module, sample, target=target, options=options)
    except BridgeError as error:
        return {stage.index: f"{type(error).__name__}: {first_line(error)}"}
    return {}
