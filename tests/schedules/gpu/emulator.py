"""Run the CUDA kernels that TVM generates on the host, to test GPU schedules without a GPU.

A module's loop functions are scheduled and lowered as for a GPU. Their CUDA source is compiled as
C++ (``emulator.h``), and calls of the functions are redirected to it. Each kernel runs twice, with
its threads in opposite orders. Both runs must write the same bits, change no input, and access
nothing outside of an array.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx.build import split_host_device_mods

from tests.legalize import compiled
from tests.relax_helpers import build_main
from tests.schedules.gpu.guarded_memory import UNUSED, Room
from tvmbridge.backends import BACKENDS
from tvmbridge.compiler.build import COMPILER_CONFIG, with_some_loops
from tvmbridge.schedules.exact_indices import with_exact_indices
from tvmbridge.schedules.gpu import schedule_for_gpu

_HEADER = Path(__file__).with_name("emulator.h")
_OPTIONS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC"]
# Ubuntu's g++ defines it: a longjmp to another fiber's stack then aborts.
_OPTIONS += ["-U_FORTIFY_SOURCE"]
# The most bytes of shared memory that a block of an H100 may ask for.
_SHARED = 227 << 10
_numbers = itertools.count()


def gpu_target(arch: str = "sm_90") -> tvm.target.Target:
    """Return the target whose source is emulated; NVRTC, if there is one, compiles the source."""
    return tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")


def host_compiler() -> str:
    """Return the path of the C++ compiler; skip the test if there is none."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler (g++) to emulate CUDA with")
    return found


@dataclass(frozen=True)
class Launch:
    """A launch of one kernel: the positions of its arguments, and its extents."""

    kernel: str
    arguments: tuple[int, ...]
    blocks: int
    threads: int


@dataclass(frozen=True)
class Lowered:
    """A lowered function: the bytes of its workspaces and its launches.

    Workspaces are numbered after the parameters.
    """

    parameters: int
    workspaces: tuple[int, ...]
    launches: tuple[Launch, ...]


def source_of(mod: tvm.IRModule, target: tvm.target.Target) -> tuple[str, dict[str, Lowered]]:
    """Return the CUDA source of a module of scheduled functions, and each function's launches."""
    with target, tvm.transform.PassContext(config=COMPILER_CONFIG):
        lower, _, finish = tvm.tirx.get_default_tir_pipeline(target)
        lowered = lower(tirx.transform.BindTarget(target)(with_exact_indices(mod)))
        host, device = split_host_device_mods(lowered)
        (kernels,) = device.values()
        generate = tvm_ffi.get_global_func("target.build.cuda")
        source = generate(finish()(kernels), target).inspect_source()
    functions = {name.name_hint: f for name, f in host.functions_items()}
    given = {name.name_hint: f for name, f in mod.functions_items()}
    return source, {name: _lowered(f, given[name]) for name, f in functions.items()}


def _lowered(host: tirx.PrimFunc, given: tirx.PrimFunc) -> Lowered:
    """Return the launches of a host function, in order."""
    parameters = [p.name for p in given.params]
    # Several buffers may have one name; they are declared in the order of the parameters.
    left = list(enumerate(parameters))
    places: list[tuple[Any, int]] = []
    workspaces: list[int] = []
    launches: list[Launch] = []

    def place(buffer: Any) -> int:
        return next(number for known, number in places if known.same_as(buffer))

    def look(node: Any) -> None:
        if isinstance(node, tirx.AllocBuffer):
            places.append((node.buffer, len(parameters) + len(workspaces)))
            items = int(np.prod([int(n) for n in node.buffer.shape]))
            workspaces.append(items * getattr(torch, str(node.buffer.dtype)).itemsize)
        elif isinstance(node, tirx.DeclBuffer):
            if node.data.op.name == "tirx.buffer_data":
                places.append((node.buffer, place(node.data.args[0])))
            else:
                found = next(pair for pair in left if pair[1] == node.buffer.name)
                left.remove(found)
                places.append((node.buffer, found[0]))
        elif getattr(node.op, "name", "") == "tirx.call_ffi_kernel":
            tags = list(node.attrs.launch_params)
            assert tags[:2] == ["blockIdx.x", "threadIdx.x"], tags
            extents = len(
                tags
            )  # the bytes of shared memory are the last, if a kernel asks for some
            name, *arguments = node.args[:-extents]
            blocks, threads = node.args[len(node.args) - extents :][:2]
            places_of = tuple(place(a.args[0]) for a in arguments)
            launches.append(Launch(name.value, places_of, int(blocks), int(threads)))

    kinds = (tirx.AllocBuffer, tirx.DeclBuffer, tvm.ir.Call)
    tvm_ffi.structural_walk(host.body, (kinds, look))
    return Lowered(len(parameters), tuple(workspaces), tuple(launches))


@functools.cache
def _precompiled_header(compiler: str) -> Path:
    """Return a header that includes ``emulator.h`` and that this process has compiled once."""
    folder = Path(tempfile.mkdtemp(prefix="tvmbridge-emulator-"))
    atexit.register(shutil.rmtree, folder)
    header = Path(shutil.copy(_HEADER, folder))
    subprocess.run([compiler, *_OPTIONS, "-x", "c++-header", str(header)], check=True)
    return header


def compile_for_host(source: str) -> ctypes.CDLL:
    """Load the library of :func:`compile_into` for the kernels of CUDA ``source``."""
    folder = Path(tempfile.mkdtemp(prefix="tvmbridge-emulator-"))
    try:
        return ctypes.CDLL(str(compile_into(folder, source)))
    finally:
        shutil.rmtree(folder)


def compile_into(folder: Path, source: str) -> Path:
    """Compile a library with functions ``run_<kernel>``, ``count_<kernel>`` of each CUDA kernel.

    The first runs a kernel; the second returns the number of its parameters.
    """
    compiler = host_compiler()
    begin = re.search(r'#ifndef TVMBRIDGE_|extern "C" __global__', source)
    assert begin is not None
    kernels = source[begin.start() :]
    # In C++ the alignment must come first.
    kernels = kernels.replace("__shared__ alignas(64)", "alignas(64) __shared__")
    asked = r"extern __shared__ __align__\(64\) uchar (\w+)\[\];"
    kernels = re.sub(asked, rf"alignas(64) __shared__ uchar \1[{_SHARED}];", kernels)
    entries = []
    bodies = re.split(r'(?=extern "C" __global__)', kernels)
    for text in bodies:
        found = re.match(r'extern "C" __global__ void[^{;]*?(\w+)\([^()]*\) \{', text)
        if found:
            meets = any(word in text for word in ("__syncthreads", "__shfl", "::"))
            entries.append(f"EMULATED({found[1]}, {str(meets).lower()})")
    text = "\n".join([f'#include "{_precompiled_header(compiler)}"', kernels, *entries, ""])
    file, out = folder / "kernels.cpp", folder / "kernels.so"
    file.write_text(text, encoding="utf-8")
    command = [compiler, *_OPTIONS, "-shared", "-o", str(out), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return out


class EmulatedFunction:
    """A scheduled function, called like TVM calls it: with inputs, then results to write into."""

    def __init__(self, library: ctypes.CDLL, lowered: Lowered, results: int) -> None:
        self.library, self.lowered, self.results = library, lowered, results

    def __call__(self, *tensors: Any) -> None:
        """Run all kernels twice, in both orders of threads."""
        arrays = [torch.from_dlpack(t) for t in tensors]
        assert len(arrays) == self.lowered.parameters
        inputs, results = arrays[: -self.results], arrays[-self.results :]
        written = [self._run(inputs, results, descending) for descending in (False, True)]
        assert written[0] == written[1], "threads in another order give another result"
        for result, data in zip(results, written[0], strict=True):
            if data:
                flat = torch.frombuffer(bytearray(data), dtype=result.dtype)
                result.copy_(flat.reshape(result.shape))

    def _run(self, inputs: Sequence[Any], results: Sequence[Any], descending: bool) -> list[bytes]:
        given = [_bytes(t) for t in inputs]
        sizes = [t.numel() * t.element_size() for t in results]
        made = (bytes([UNUSED]) * n for n in (*sizes, *self.lowered.workspaces))
        rooms = [Room(data, at_end=descending) for data in (*given, *made)]
        for launch in self.lowered.launches:
            run = getattr(self.library, f"run_{launch.kernel}")
            run.restype = ctypes.c_char_p
            addresses = [rooms[place].address for place in launch.arguments]
            pointers = (ctypes.c_void_p * len(addresses))(*addresses)
            failure = run(pointers, launch.blocks, launch.threads, int(descending))
            assert not failure, f"{launch.kernel}: {failure.decode()}"
        for room, data in zip(rooms, given, strict=False):
            assert room.contents() == data, "a kernel writes into an input"
        return [room.contents() for room in rooms[len(given) :]][: len(results)]


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def emulated(mod: tvm.IRModule) -> tvm.IRModule:
    """Return ``mod`` with its scheduled functions and their calls replaced by emulated kernels."""
    BACKENDS["cuda"].prepare()
    scheduled = {n: f for n, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    loops = {n: f.with_attr("global_symbol", n.name_hint) for n, f in scheduled.items()}
    if not loops:
        return mod
    source, functions = source_of(tvm.IRModule(loops), gpu_target())
    library = compile_for_host(source)
    calls = _Calls(mod, {n.name_hint: (library, functions[n.name_hint]) for n in loops})
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function):
            calls.builder_.update_func(name, calls.visit_expr(function))
    rest = dict(calls.builder_.get().functions_items())
    return tvm.IRModule({n: f for n, f in rest.items() if n not in loops}, attrs=mod.attrs)


@relax.expr_functor.mutator
class _Calls(relax.PyExprMutator):
    """A mutator that turns ``call_tir`` into calls of registered Python functions."""

    def __init__(self, mod: tvm.IRModule, kernels: Mapping[str, Any]) -> None:
        super().__init__(mod)
        self.kernels, self.names = kernels, dict[tuple[str, int], str]()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir":
            return call
        types = list(call.ty_args)
        given = types[0]
        made = list(given.fields) if isinstance(given, relax.TupleType) else [given]
        kernel = self._register(call.args[0].name_hint, len(made))
        return relax.op.call_dps_packed(kernel, call.args[1], made if len(made) > 1 else made[0])

    def _register(self, name: str, results: int) -> str:
        if (name, results) not in self.names:
            library, lowered = self.kernels[name]
            symbol = f"tests.emulated.{next(_numbers)}.{name}"
            tvm_ffi.register_global_func(symbol, EmulatedFunction(library, lowered, results))
            self.names[name, results] = symbol
        return self.names[name, results]


def schedule(mod: tvm.IRModule, _: tvm.target.Target) -> tvm.IRModule:
    """Schedule a module and replace its functions by emulated kernels, as a backend's hook."""
    return emulated(schedule_for_gpu(mod, gpu_target()))


def emulate_gpu(patch: pytest.MonkeyPatch) -> None:
    """Patch the compiler: modules on the CPU are compiled as for a GPU, with emulated kernels."""
    cpu, gpu = BACKENDS["cpu"], BACKENDS["cuda"]
    passes, loops = gpu.kernel_passes, gpu.norms_in_loops
    backend = replace(
        cpu, kernel_passes=passes, norms_in_loops=loops, schedule=schedule, tuned=False
    )
    patch.setitem(BACKENDS, "cpu", backend)


def run_all(
    formula: Callable[..., relax.Expr | Sequence[relax.Expr]], *inputs: torch.Tensor
) -> list[torch.Tensor]:
    """Return the results of a Relax ``formula`` on the inputs, by emulated kernels."""
    return run_module(build_main(inputs, formula), *inputs)


def run_each(
    formula: Callable[..., relax.Expr | Sequence[relax.Expr]], *cases: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return the results of ``formula`` on the inputs of each case, all compiled as one module."""
    counts: list[int] = []

    def together(*variables: relax.Expr) -> list[relax.Expr]:
        rest, results = iter(variables), list[relax.Expr]()
        for case in cases:
            found = formula(*itertools.islice(rest, len(case)))
            results += [found] if isinstance(found, relax.Expr) else found
            counts.append(len(results))
        return results

    flat = run_all(together, *itertools.chain.from_iterable(cases))
    return [flat[begin:end] for begin, end in itertools.pairwise([0, *counts])]


def run_module(mod: tvm.IRModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a module's ``main``, by emulated kernels."""
    with gpu_target():
        mod = compiled.fuse(mod)
    mod = with_some_loops(schedule(mod, gpu_target()))
    result = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*inputs)
    return [torch.from_dlpack(r) for r in result]
