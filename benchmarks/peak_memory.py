"""Peak memory of a training step (forward, backward, SGD): TVM's code against eager PyTorch.

Each runs in its own process. After compilation and two steps, all memory of a step is released:
gradients, TVM's pool, free memory of the C library. Then one more step runs. The figure is the
highest resident memory during that step, minus the resident memory before it. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import tvm_ffi

from benchmarks.common import Row, parser, report
from benchmarks.modules import MODULES
from tvmbridge import add_tvm_dispatch, dispatch_report

BOUND = 1.0
MEBIBYTE = 2**20


def kibibytes(field: str) -> int:
    """Return a field of ``/proc/self/status``, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"the kernel does not tell {field}")


def give_back() -> None:
    """Return unused memory to the system."""
    gc.collect()
    tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()
    ctypes.CDLL(None).malloc_trim(0)


def peak(name: str, policy: str | None) -> int:
    """Return the bytes that a training step of ``MODULES[name]`` needs.

    ``policy`` is the residual policy; None measures eager PyTorch.
    """
    module, x = MODULES[name]()
    if policy is not None:
        add_tvm_dispatch(module, x, options={"residual_policy": policy})
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def forget() -> None:
        optimizer.zero_grad(set_to_none=True)
        x.grad = None

    def step() -> None:
        forget()
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        output.square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    if policy is not None:
        assert not dispatch_report(module).fallbacks
    forget()
    give_back()
    before = kibibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return (kibibytes("VmHWM") - before) * 1024


def in_a_process(name: str, policy: str | None, repeats: int) -> float:
    """Return the least of ``repeats`` measurements, each in a new process."""
    command = [sys.executable, "-m", "benchmarks.peak_memory", "--one", name, policy or "eager"]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        for _ in range(repeats)
    ]
    return min(float(run.stdout.split()[-1]) for run in runs)


def main(argv: Sequence[str] = ()) -> int:
    """Measure each chosen module with each chosen policy, and in eager PyTorch."""
    options = parser(__doc__)
    options.add_argument("--modules", nargs="+", default=list(MODULES), choices=list(MODULES))
    options.add_argument("--policies", nargs="+", default=["min_cut"])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--one", nargs=2, metavar=("MODULE", "POLICY"), help="used by itself")
    chosen = options.parse_args(list(argv))
    if chosen.one:
        name, policy = chosen.one
        print(peak(name, None if policy == "eager" else policy))
        return 0
    rows = []
    for name in chosen.modules:
        eager = in_a_process(name, None, chosen.repeats)
        rows.append(Row(f"{name}: eager", eager / MEBIBYTE, "MiB"))
        for policy in chosen.policies:
            ours = in_a_process(name, policy, chosen.repeats)
            rows.append(Row(f"{name}: {policy}", ours / MEBIBYTE, "MiB"))
            rows.append(Row(f"{name}: {policy} / eager", ours / eager, "", BOUND))
    return report("peak memory of a training step", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
