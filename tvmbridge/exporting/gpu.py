"""Compile the kernels of an exported function for NVIDIA's GPUs."""

from __future__ import annotations

import re
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmbridge.backends.cuda.source import compile_source
from tvmbridge.core.errors import BuildError, ExportError
from tvmbridge.frontend.origins import origin_of

_ARCHITECTURE = re.compile(r"(?:cuda\s*)?(?:-?-?arch=)?(sm_\d+[af]?)")
# The tensor cores' instructions, and copies to shared memory, begin with this architecture.
_LEAST = 80


def is_gpu(target: Any) -> bool:
    """Whether a target is an NVIDIA GPU."""
    return isinstance(target, tvm.target.Target) and target.kind.name == "cuda"


def gpu_target(target: Any, host: tvm.target.Target) -> tvm.target.Target | None:
    """Return the target of an NVIDIA GPU that ``target`` names; None if it names none.

    Raises:
        BuildError: its architecture is missing, or has no kernels.
    """
    if isinstance(target, str) and target.startswith(("cuda", "sm_")):
        found = _ARCHITECTURE.fullmatch(target.strip())
        architecture = found[1] if found else ""
    elif isinstance(target, dict) and target.get("kind") == "cuda":
        architecture = str(target.get("arch", ""))
    elif is_gpu(target):
        architecture = str(target.attrs.get("arch", ""))
    else:
        return None
    number = re.fullmatch(r"sm_(\d+)[af]?", architecture)
    if number is None or int(number[1]) < _LEAST:
        raise BuildError(
            f"target {target!r} names no GPU from compute capability 8.0 on: give one such as "
            '"cuda -arch=sm_90", or {"kind": "cuda", "arch": "sm_90"}'
        )
    # The instructions for groups of warps are those of one architecture alone.
    architecture = {"sm_90": "sm_90a"}.get(architecture, architecture)
    return tvm.target.Target({"kind": "cuda", "arch": architecture}, host=host)


def with_traps(mod: tvm.IRModule) -> tvm.IRModule:
    """Return ``mod`` with loops that stop the GPU where they would raise an error on a CPU.

    The call that waits for the GPU then fails, as after an assertion of PyTorch's kernels.
    """
    stop = tirx.Evaluate(tirx.call_extern("void", "__trap"))

    def trapping(check: tirx.AssertStmt) -> tirx.Stmt:
        return tirx.IfThenElse(tirx.Not(check.condition), stop, None)

    changed = {}
    for name, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            body = tvm_ffi.structural_map(function.body, (tirx.AssertStmt, trapping))
            if not body.same_as(function.body):
                changed[name] = function.with_body(body).without_attr("tirx.is_scheduled")
    return tvm.IRModule({**dict(mod.functions_items()), **changed}, attrs=mod.attrs)


def refuse_unscheduled(mod: tvm.IRModule) -> None:
    """Refuse a scheduled module with loops that are no GPU kernels.

    Raises:
        ExportError: the message names all such functions, with the lines of the model.
    """
    loops = {
        name.name_hint
        for name, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and not _has_kernels(function)
    }
    found = dict[str, None]()

    def look(call: relax.Call) -> None:
        if getattr(call.op, "name", "") == "relax.call_tir" and call.args[0].name_hint in loops:
            origin = origin_of(call)
            place = "" if origin is None else origin.place
            found[f"{call.args[0].name_hint}{place}"] = None

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            tvm_ffi.structural_walk(function.body, (tvm.ir.Call, look))
    if found:
        raise ExportError(f"there are no kernels of GPUs for: {'; '.join(found)}")


def _has_kernels(function: tirx.PrimFunc) -> bool:
    bound = list[bool]()

    def look(loop: tirx.For) -> None:
        bound.append(loop.kind == tirx.ForKind.THREAD_BINDING)

    tvm_ffi.structural_walk(function.body, (tirx.For, look))
    return any(bound)


def cubin_of(executable: Any, target: tvm.target.Target) -> bytes:
    """Return the machine code of all kernels of an executable of TVM; empty if it has none.

    Raises:
        BuildError: there is no CUDA compiler, or it refuses the kernels.
    """
    sources = list[str]()
    left = [executable.mod]
    while left:
        module = left.pop()
        left += list(module.imports)
        if module.kind == "cuda":
            sources.append(module.inspect_source())
    if len(sources) > 1:
        raise BuildError("the kernels are in several modules")
    return compile_source(sources[0], str(target.attrs["arch"])) if sources else b""
