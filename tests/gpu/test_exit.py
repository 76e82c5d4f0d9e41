"""The exit of a process while its dispatched module is still alive."""

from __future__ import annotations

import subprocess
import sys

from tests.gpu.helpers import GPU

pytestmark = GPU

_SCRIPT = """
import torch
import tvmbridge

module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()
x = torch.randn(4, 8, device="cuda", requires_grad=True)
tvmbridge.add_tvm_dispatch(module, x)
held = [module(x) for _ in range(5)]
held[-1].sum().backward()
keep = [module, held]
keep.append(keep)
print("served", tvmbridge.dispatch_report(module).tvm_calls)
"""


def test_the_process_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "served 5" in done.stdout
    assert "terminate" not in done.stderr


def test_the_first_module_of_a_process_is_replayed() -> None:
    script = _SCRIPT + "print(tvmbridge.dispatch_report(module).specializations[0].graph_replays)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200
    )
    assert int(done.stdout.split()[-1]) > 0, done.stderr[-2000:]
