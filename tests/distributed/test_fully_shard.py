"""Blocks under ``fully_shard`` train as in eager PyTorch, dispatched before or after sharding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.distributed.processes import run_ranks, values
from tests.distributed.sharded_scripts import Block, Setting, compared
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report

QUICK = {"sharded first": Setting(sharded_first=True, sample=True, reshard=False)}
ALL = {
    **QUICK,
    "dispatched first": Setting(),
    "bfloat16": Setting(mixed=True, dtype=torch.float32),
    "sample, then sharded": Setting(sample=True),
    "sharded, no sample": Setting(sharded_first=True),
    "kept gathered": Setting(reshard=False),
    "checkpointed": Setting(checkpoint=True, dropout=0.3),
    "accumulated": Setting(accumulate=True),
    "accumulated bfloat16": Setting(
        accumulate=True, checkpoint=True, mixed=True, dtype=torch.float32
    ),
}


def check(settings: dict[str, Setting], ranks: int, device_type: str = "cpu") -> None:
    """Compare the training of the settings with eager PyTorch, on ``ranks`` processes."""
    outcomes = run_ranks(compared, ranks, settings, device_type, on_gpus=device_type != "cpu")
    for found in values(outcomes):
        for name, (served, losses, weights) in found.items():
            assert served == 1.0, name
            # bfloat16 products may differ by one unit in the last place, and steps accumulate it.
            bound = 2e-2 if settings[name].mixed else 1e-12
            assert max(losses, weights) <= bound, (name, losses, weights)


def test_steps_are_those_of_eager() -> None:
    check(QUICK, 2)


@pytest.mark.parametrize("how", thinned(["fully_shard", "FullyShardedDataParallel"], 2))
def test_a_module_that_is_split_after_its_compilation_is_refused_by_name(how: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        block, sample = Block(0.0), torch.randn(2, 5, 16)
        block.held = torch.ones(3)[None]  # a view, but not of a flat parameter
        add_tvm_dispatch(block, sample, on_fallback="silent")
        eager = block(sample).detach()
        assert dispatch_report(block).tvm_calls == 1
        called, part = split(block, how)
        torch.testing.assert_close(called(sample).detach(), eager)
        (reason,) = dispatch_report(block).fallbacks
        assert reason.startswith(part), reason
    finally:
        dist.destroy_process_group()


def split(block: Block, how: str) -> tuple[nn.Module, str]:
    """Split the block's parameters over processes; return it and how its reason begins."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    if how == "fully_shard":
        for part in (block.up, block):
            fully_shard(part, mesh=mesh)
        return block, "its submodule up is sharded by itself (fully_shard)"
    device = torch.device("cpu")
    wrapped = FullyShardedDataParallel(nn.Sequential(block), device_id=device, use_orig_params=True)
    return wrapped, "its parameters are sharded by FullyShardedDataParallel"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALL) - set(QUICK)))
def test_steps_are_those_of_eager_in_all_settings(name: str) -> None:
    check({name: ALL[name]}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_steps_are_those_of_eager_on_other_numbers_of_ranks(ranks: int) -> None:
    check({"sharded": Setting(), "checkpointed": ALL["checkpointed"]}, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "pipeline"])
def test_the_example_resumes_with_the_losses_of_eager(strategy: str, tmp_path: Path) -> None:
    def last_loss(*arguments: str) -> float:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", "2", "-m", "examples.pretrain", *arguments]
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [*command, "--strategy", strategy, "--layers", "2"],
            cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True,
            timeout=300, check=True,
        )  # fmt: skip
        found = re.search(r"loss ([\d.]+)", done.stdout)
        assert found, done.stdout
        return float(found[1])

    last_loss("--folder", str(tmp_path), "--steps", "4", "--every", "4")
    resumed = last_loss("--folder", str(tmp_path), "--steps", "6")
    assert abs(resumed - last_loss("--eager", "--steps", "6")) < 1e-3
