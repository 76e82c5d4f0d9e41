"""DistributedDataParallel over gloo with a dispatched module has the same gradients as eager."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tvmbridge import add_tvm_dispatch, dispatch_report


class Net(nn.Module):
    """A network with running statistics, and a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _steps(dispatched: bool, x: torch.Tensor) -> list[dict[str, torch.Tensor | None]]:
    """Run three steps, the second under ``no_sync``; return gradients and statistics of each."""
    torch.manual_seed(0)
    module = Net().double().train()
    if dispatched:
        add_tvm_dispatch(module, x)
    parallel = DistributedDataParallel(
        module, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    found: list[dict[str, torch.Tensor | None]] = []
    for step in range(3):
        if step == 1:
            with parallel.no_sync():
                parallel(x * 2).square().sum().backward()
        else:
            parallel(x + step).square().sum().backward()
        gradients = {n: p.grad for n, p in module.named_parameters()}
        found.append({n: None if g is None else g.clone() for n, g in gradients.items()})
    found.append({n: b.clone() for n, b in module.named_buffers()})
    if dispatched:
        assert dispatch_report(module).tvm_calls == 3
        assert not dispatch_report(module).fallbacks
    return found


def _worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        torch.testing.assert_close(_steps(True, x), _steps(False, x))
        Path(folder, str(rank)).touch()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without distributed")
def test_gradients_are_those_of_eager_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
