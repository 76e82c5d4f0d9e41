"""The probes of the doctor, each run in a process of its own because it may crash.

As a script, this file runs one probe and prints its result as one line of JSON. Only the probes of
compiled halves import tvmbridge: the others must work with package versions that it refuses.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALIGNMENT = 64
RESULT_MARK = "doctor-probe-result:"
SHAPE = (4, 64)
PRIVATE_NAMES = Path(__file__).parents[1] / "core" / "torch_private" / "table" / "__init__.py"


def torch_facts() -> dict[str, Any]:
    """Return the number of threads and the instruction set that PyTorch uses."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def compiler() -> dict[str, Any]:
    """Run an addition compiled by TVM on torch tensors, and compare it with torch's result."""
    import torch
    import tvm
    from tvm import relax

    builder = relax.BlockBuilder()
    a, b = (relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in "ab")
    with builder.function("main", [a, b]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(a, b))
        builder.emit_func_output(result)
    executable = tvm.compile(builder.get(), target=tvm.target.Target("llvm"))
    call = relax.VirtualMachine(executable, tvm.cpu())["main"]
    x, y = (torch.randn(SHAPE) for _ in range(2))
    return {"equal": torch.equal(call(x, y), x + y)}


def halves() -> dict[str, Any]:
    """Return the state of each compiled half, which is optional: its path, or why it is missing."""
    from tvmbridge.core.compiled_half import states

    return {"halves": _as_facts(states())}


def build_halves() -> dict[str, Any]:
    """Compile the missing compiled halves, and return all states as :func:`halves` does."""
    from tvmbridge.core.compiled_half import build_halves as build

    return {"halves": _as_facts(build())}


def _as_facts(states: list[Any]) -> list[dict[str, Any]]:
    return [
        {"name": s.half.name, "path": None if s.path is None else str(s.path), "text": str(s)}
        for s in states
    ]


def linker() -> dict[str, Any]:
    """Return the program that TVM links compiled code with; None if there is none."""
    from tvm.support.cc import get_cc

    return {"linker": get_cc()}


def alignment() -> dict[str, Any]:
    """Check that new tensors, and clones of misaligned views, start at multiples of 64 bytes."""
    import torch

    tensors = [torch.empty(n) for n in (1, 3, 17, 1000, 4097)]
    tensors.append(torch.empty(65)[1:].clone())
    return {"aligned": all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)}


def gpu() -> dict[str, Any]:
    """Describe the current GPU, if there is one, and try to capture and replay a CUDA graph."""
    import torch

    if not torch.cuda.is_available():
        return {"available": False}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            y = x + 1
        graph.replay()
        graphs = bool((y == 1).all())
    except RuntimeError:
        graphs = False
    amd = torch.version.hip is not None
    return {
        "available": True,
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "arch": properties.gcnArchName if amd else f"sm_{properties.major}{properties.minor}",
        "runtime": f"ROCm {torch.version.hip}" if amd else f"CUDA {torch.version.cuda}",
        "driver": _driver(),
        "needs_nvcc": not amd,
        "graphs": graphs,
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver as ``nvidia-smi`` reports it; None without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.split()
    return lines[0] if lines and not done.returncode else None


def private_names() -> dict[str, Any]:
    """Check that the private names of torch that tvmbridge uses are present and as expected."""
    name = "private_names_of_torch"
    spec = importlib.util.spec_from_file_location(name, PRIVATE_NAMES)
    assert spec is not None
    assert spec.loader is not None
    table = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return {"checked": len(table.TABLE), "problems": table.problems()}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "compiler": compiler,
    "halves": halves,
    "build_halves": build_halves,
    "linker": linker,
    "alignment": alignment,
    "private_names": private_names,
    "gpu": gpu,
}


def main(name: str) -> None:
    """Run a probe by its name, and print its result or its error."""
    result: dict[str, Any]
    try:
        result = {"facts": PROBES[name](), "error": None}
    except Exception as error:
        lines = str(error).strip().splitlines()
        result = {"facts": {}, "error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
    print(RESULT_MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
