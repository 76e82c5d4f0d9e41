"""Functions that ranks run: they save a checkpoint while one of the ranks fails."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.distributed.models import Language
from tests.distributed.scripts import eager_runner
from tvmbridge.distributed import checkpoint, load_checkpoint, save_checkpoint


def broken_checkpoint(rank: int) -> None:
    """Save two checkpoints; one rank cannot write the second."""
    folder = Path(tempfile.gettempdir()) / f"checkpoint-{os.environ['MASTER_PORT']}"
    runner = eager_runner()[0]
    optimizer = torch.optim.AdamW(runner.parameters())
    optimizer.step()
    save_checkpoint(runner, folder, optimizer)
    before = {n: t.clone() for n, t in runner.full_state_dict().items()}
    with torch.no_grad():
        for parameter in runner.parameters():
            parameter.add_(1)
    if rank == 1:
        next(iter(optimizer.state.values()))["step"] = "not a tensor"
    try:
        save_checkpoint(runner, folder, optimizer)
    finally:
        load_checkpoint(runner, folder)
        after = runner.full_state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before), "the old one is not whole"
        if rank == 0:
            shutil.rmtree(folder)
            assert not list(folder.parent.glob(f"{folder.name}*")), "something was left"


def killed_while_saving(rank: int, folder: str) -> None:
    """Kill the second rank after it has begun to write; the earlier checkpoint must survive."""
    runner = eager_runner()[0]
    save_checkpoint(runner, folder)
    before = runner.full_state_dict()
    with torch.no_grad():
        for parameter in runner.parameters():
            parameter.add_(1)

    def killed(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        checkpoint.save = killed  # type: ignore[assignment]
    try:
        save_checkpoint(runner, folder)
    finally:
        read = Language().state_dict()
        load({"model": read}, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(before[n], read[n]) for n in before), "the old one is not whole"
