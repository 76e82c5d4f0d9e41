"""DistributedDataParallel with one process a GPU: replayed CUDA graphs give eager's gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.helpers import GPU

pytestmark = [*GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

_SCRIPT = """
import copy, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.gpu.helpers import replays, small
from tvmbridge import add_tvm_dispatch
from tvmbridge.dispatch import _code_of

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
eager = small().cuda()
tvm = copy.deepcopy(eager)
torch.manual_seed(1 + rank)
batches = torch.randn(12, 32, 64, device="cuda")
parts = int(sys.argv[1])
options = {"gradient_parts": parts, "only_if_faster": False}
add_tvm_dispatch(tvm, batches[0].clone(), options=options)
pair = [DistributedDataParallel(m, device_ids=[rank]) for m in (tvm, eager)]
optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in pair]
for x in batches:
    for module, optimizer in zip(pair, optimizers):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(tvm.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
assert replays(tvm) > 0
[(_, entry)] = _code_of(tvm).kept.known[0].compiled()
counts = entry.graph_replays
# Each part is a graph of its own.
assert (counts["backward"] > counts["forward"]) == (parts > 1), (counts, entry.graph_skips)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("parts", [1, 3])
def test_gradients_are_those_of_eager(parts: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), str(parts)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
