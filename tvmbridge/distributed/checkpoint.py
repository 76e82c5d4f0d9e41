"""Checkpoints of a whole module, by torch.distributed.checkpoint.

A checkpoint has the module's own names, whatever the stages, so another number of stages or a
single device can load it. ``torch.distributed.checkpoint.load({"model": module.state_dict()},
checkpoint_id=folder)`` loads one without tvmbridge.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed.runner import PipelineRunner

_OPTIMIZER = "optimizer."


def save_checkpoint(
    runner: PipelineRunner,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write the states of module and optimizer into ``folder``; all ranks call it together.

    The folder appears, or is replaced, when everything has been written. The settings of the
    optimizer's groups are not saved, because the script sets them.

    Raises:
        PipelineError: a rank could not write, or its optimizer's state has values that are no
            tensors.
    """
    control = runner.control
    goal = Path(folder)
    partial = goal.with_name(f"{goal.name}.partial")
    control.call_roll("to save a checkpoint")
    error: BaseException | None = None
    try:
        state: dict[str, Any] = {"model": runner.state_dict()}
        if optimizer is not None:
            state["optimizer"] = _optimizer_state(runner, optimizer)
    except Exception as problem:
        error = problem
    control.agree(error, "the checkpoint cannot be saved")
    try:
        if control.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        control.call_roll("to save a checkpoint")
        save(state, checkpoint_id=partial, process_group=control.group)
    except (Exception, CheckpointException) as problem:
        error = problem
    control.agree(error, "the checkpoint cannot be saved")
    try:
        if control.rank == 0:
            _put_in_place(partial, goal)
    except OSError as problem:
        error = problem
    control.agree(error, "the checkpoint cannot be saved")


def _put_in_place(partial: Path, goal: Path) -> None:
    old = goal.with_name(f"{goal.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if goal.exists():
        goal.rename(old)
    partial.rename(goal)
    shutil.rmtree(old, ignore_errors=True)


def _optimizer_state(
    runner: PipelineRunner, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer's tensors by the names of the parameters."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in runner.named_parameters():
        values = optimizer.state.get(parameter, {})
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise PipelineError(f"the optimizer keeps {key} of {name}, which is no tensor")
        if values:
            found[name] = dict(values)
    return found


def load_checkpoint(
    runner: PipelineRunner,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read a checkpoint of :func:`save_checkpoint`; all ranks call it together.

    The stages may differ from those that wrote it.

    Raises:
        PipelineError: there is no such checkpoint, or it is not of this module.
    """
    control = runner.control
    error: BaseException | None = None
    try:
        model = {name: torch.empty_like(t) for name, t in runner.state_dict().items()}
        state: dict[str, Any] = {"model": model}
        if optimizer is not None:
            state["optimizer"] = _empty_optimizer_state(runner, folder)
    except Exception as problem:
        error = problem
    control.agree(error, "the checkpoint cannot be loaded")
    try:
        load(state, checkpoint_id=folder, process_group=control.group)
        runner.load_state_dict(model)
        if optimizer is not None:
            _fill(runner, optimizer, state["optimizer"])
    except (Exception, CheckpointException) as problem:
        error = problem
    control.agree(error, "the checkpoint cannot be loaded")


def _empty_optimizer_state(
    runner: PipelineRunner, folder: str | os.PathLike[str]
) -> dict[str, dict[str, torch.Tensor]]:
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    parameters = dict(runner.named_parameters())
    found: dict[str, dict[str, torch.Tensor]] = {}
    for full, entry in metadata.items():
        name, _, key = full.removeprefix(_OPTIMIZER).rpartition(".")
        if full.startswith(_OPTIMIZER) and name in parameters:
            assert isinstance(entry, TensorStorageMetadata)
            # Steps are counted on the CPU, whatever the device of the parameter.
            device = parameters[name].device if entry.size == parameters[name].shape else "cpu"
            made = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
            found.setdefault(name, {})[key] = made
    return found


def _fill(
    runner: PipelineRunner,
    optimizer: torch.optim.Optimizer,
    state: dict[str, dict[str, torch.Tensor]],
) -> None:
    names = {id(p): name for name, p in runner.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = state.get(names.get(id(parameter), ""), {})
            if values:
                optimizer.state[parameter] = values
