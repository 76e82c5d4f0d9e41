"""The doctor's experiments, each run in a process of its own because it may crash.

Run as a script, it prints one line of JSON. It imports nothing of tvmbridge, so that it also works
with an installation that tvmbridge refuses.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALIGNMENT = 64
RESULT_MARK = "doctor-probe-result:"
SHAPE = (4, 64)
GPU_TARGETS = ("cuda", "rocm")
PRIVATE_NAMES = Path(__file__).parents[1] / "core" / "torch_private" / "table" / "__init__.py"


def torch_facts() -> dict[str, Any]:
    """What this PyTorch is and which devices it sees."""
    import torch

    gpu = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpu": gpu,
        "hip": torch.version.hip,
        "gpu_names": names if gpu else [],
        "arch": _gpu_arch() if gpu else None,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def compile_for(target: str) -> dict[str, Any]:
    """Compiles an addition for a target given as JSON; a failure raises."""
    _compile(json.loads(target))
    return {}


def run_cpu() -> dict[str, Any]:
    """Runs a compiled addition on torch tensors and compares it with torch's."""
    import torch

    return _run_add({"kind": "llvm"}, torch.device("cpu"))


def run_gpu(target: str) -> dict[str, Any]:
    """The same on the GPU."""
    import torch

    return _run_add(json.loads(target), torch.device("cuda"))


def private_names() -> dict[str, Any]:
    """Which of the private names that tvmbridge uses this PyTorch lacks, or has otherwise."""
    name = "private_names_of_torch"
    spec = importlib.util.spec_from_file_location(name, PRIVATE_NAMES)
    assert spec is not None
    assert spec.loader is not None
    table = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return {"checked": len(table.TABLE), "problems": table.problems()}


def alignment() -> dict[str, Any]:
    """Whether torch allocates as compiled code needs it, and how a misaligned view is mended."""
    import torch

    sizes = [1, 3, 17, 1000, 4097]
    allocated = all(torch.empty(n).data_ptr() % ALIGNMENT == 0 for n in sizes)
    view = torch.empty(65)[1:]
    copied = view.clone().data_ptr() % ALIGNMENT == 0
    return {
        "allocations": allocated,
        "view": view.data_ptr() % ALIGNMENT == 0,
        "copy": copied,
    }


def stream(target: str) -> dict[str, Any]:
    """Whether compiled code runs on PyTorch's current stream.

    Work is queued on a side stream behind a long wait; code on another stream would overtake it and
    read the old values.
    """
    import torch

    call = _load(_compile(json.loads(target)), torch.device("cuda"))
    side = torch.cuda.Stream()
    x = torch.zeros(SHAPE, device="cuda")
    y = torch.ones(SHAPE, device="cuda")
    call(x, y)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)
        result = call(x, y)
    side.synchronize()
    return {"ordered": bool((result == 2.0).all().item())}


def _gpu_arch() -> str:
    import torch

    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(0).gcnArchName
        return name.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _module() -> Any:
    from tvm import relax

    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(x, y))
        builder.emit_func_output(result)
    return builder.get()


def _compile(target: dict[str, Any]) -> Any:
    import tvm
    from tvm import relax
    from tvm.s_tir import dlight

    module = _module()
    with tvm.target.Target(target) as resolved:
        if target["kind"] in GPU_TARGETS:
            module = relax.get_pipeline("zero")(module)
            module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(module)
        return tvm.compile(module, target=resolved)


def _load(executable: Any, device: Any) -> Callable[..., Any]:
    import torch
    import tvm
    from tvm import relax

    kind = "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    main: Callable[..., Any] = relax.VirtualMachine(executable, tvm.device(kind))["main"]
    return main


def _run_add(target: dict[str, Any], device: Any) -> dict[str, Any]:
    import torch

    call = _load(_compile(target), device)
    x, y = (torch.randn(SHAPE, device=device) for _ in range(2))
    return {"equal": torch.equal(call(x, y), x + y)}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_facts,
    "compile": compile_for,
    "run_cpu": run_cpu,
    "run_gpu": run_gpu,
    "alignment": alignment,
    "private_names": private_names,
    "stream": stream,
}


def main(words: list[str]) -> None:
    """Runs the probe that the first word names with the other words, and prints its result."""
    name, *arguments = words
    result: dict[str, Any]
    try:
        result = {"facts": PROBES[name](*arguments), "error": None}
    except Exception as error:
        lines = str(error).strip().splitlines()
        result = {"facts": {}, "error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
    print(RESULT_MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
