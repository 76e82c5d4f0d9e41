"""An exported function: check its arguments, call the code, and rebuild the results."""

from __future__ import annotations

import ctypes
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy

from tvmbridge_runtime.container import Container, open_container
from tvmbridge_runtime.errors import ArgumentError, FileError, MachineError, RuntimeFileError
from tvmbridge_runtime.gpu import CUDA, GpuTensors, check_gpu, machine_code, machine_code_lock
from tvmbridge_runtime.libraries import ffi, tvm_version
from tvmbridge_runtime.locks import Lock
from tvmbridge_runtime.processor import check_processor
from tvmbridge_runtime.structure import rebuilt
from tvmbridge_runtime.symbols import sizes_of
from tvmbridge_runtime.weights import NUMPY, aligned, weights_of

_CPU, _POOLED = 1, 2
# TVM keeps the buffers of each size for later calls. Only those of this many sizes are kept.
_KEPT_SIZES = 4
# Errors of Python for a manifest that does not describe the file; the last one: nested too deeply.
_OF_CONTENT = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    RecursionError,
)


def load(path: str | os.PathLike[str], *, threads: int | None = None, gpu: int = 0) -> Function:
    """Return the function of a file that ``tvmbridge.export`` wrote.

    Args:
        path: the file. Weights that were written beside it must be in the same folder.
        threads: the number of threads that a call may use; None: one for each processor that this
            process may use.
        gpu: the number of the GPU that runs the code, if it is for GPUs.

    Raises:
        FileError: the file is damaged, or is no exported function.
        MachineError: this processor, this GPU, or the installed TVM, cannot run it.
        OSError: the file cannot be read.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is {threads!r}; give a number of at least 1, or None")
    try:
        return _loaded(path, threads or _processors(), gpu)
    except _OF_CONTENT as error:
        raise FileError(
            f"{path} has a manifest that does not describe its content "
            f"({type(error).__name__}: {error}); export the function again"
        ) from error


def _loaded(path: str | os.PathLike[str], threads: int, gpu: int) -> Function:
    container = open_container(path)
    manifest = container.manifest
    _check_entries(manifest)
    check_processor(manifest["target"])
    module = ffi()
    expected, found = manifest["versions"]["tvm"], tvm_version()
    if found and found != expected:
        raise MachineError(
            f"{path} was compiled by TVM {expected}, and TVM {found} is installed: install "
            f"apache-tvm=={expected}, or export the function again"
        )
    tensors = None
    if manifest["target"]["kind"] == "cuda":
        check_gpu(manifest["target"], gpu)
        tensors = GpuTensors(gpu)
    return Function(container, *_machine(container, module, tensors), threads, tensors)


def _check_entries(manifest: Mapping[str, Any]) -> None:
    """Read the entries that calls will read; an error of Python says which one is wrong."""
    symbols = {symbol["name"] for symbol in manifest["symbols"]}
    for given in manifest["inputs"]:
        NUMPY[given["dtype"]], {given["name"]}
        for extent in given["shape"]:
            if extent not in symbols and not (type(extent) is int and 0 <= extent < 1 << 48):
                raise ValueError(f"argument {given['name']!r} has a dimension of {extent!r}")
    for symbol in manifest["symbols"]:
        symbol["least"] + 0, symbol["most"], symbol.get("offset", 0) + 0
        if not symbol.get("scale", 1) >= 1:
            raise ValueError(f"symbol {symbol['name']!r} has the scale {symbol['scale']!r}")
    for output in manifest["outputs"]:
        {output["dtype"]}, output["copied"]
    for check in manifest["checks"]:
        manifest["outputs"][check["output"]], check["error"], check["message"]
    list(manifest["relations"])
    rebuilt(manifest["structure"], manifest["outputs"])


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine(container: Container, module: Any, gpu: GpuTensors | None) -> tuple[Any, ctypes.CDLL]:
    """Return a virtual machine of TVM with the code of ``container``, and the code's library."""
    devices = [_CPU, 0, _POOLED]
    if gpu is not None:
        devices = [CUDA, gpu.number, _POOLED, *devices]
    with (
        tempfile.TemporaryDirectory(prefix="tvmbridge-") as folder,
        nullcontext() if gpu is None else machine_code_lock,
        nullcontext() if gpu is None else machine_code(container),
    ):
        path = Path(folder, "code.so")
        code = container.section("code")
        _check_library(code)
        path.write_bytes(code)
        try:
            executable = module.load_module(str(path))
            machine = executable["vm_load_executable"]()
            machine["vm_initialization"](*devices)
            return machine, ctypes.CDLL(str(path))
        except Exception as error:
            raise MachineError(f"{container.path} cannot be loaded: {error}") from error


def _check_library(code: memoryview) -> None:
    """Check that all of a shared library is there; the system's loader crashes otherwise.

    The table of sections is the last part of a library that a linker writes.
    """
    at, width, count = (
        int.from_bytes(code[first : first + size], "little")
        for first, size in ((40, 8), (58, 2), (60, 2))
    )
    if bytes(code[:5]) != b"\x7fELF\x02" or at + width * count > len(code):
        raise ValueError("its code is no whole library")


def _checksum_of(library: ctypes.CDLL) -> Callable[[memoryview], int]:
    """Return the CRC-32 in the code, which is several times as fast as the one of zlib."""
    function = getattr(library, "tvmbridge_crc32", None)
    if function is None:
        return zlib.crc32
    function.restype, function.argtypes = ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_size_t)

    def checksum(part: memoryview) -> int:
        return int(function(numpy.frombuffer(part, numpy.uint8).ctypes.data, len(part)))

    return checksum


class Function:
    """A function of arrays. Any number of threads may call it; their calls take turns.

    - ``inputs``: name, shape and dtype of each argument; the name of a symbol replaces a symbolic
      size.
    - ``manifest``: the whole manifest of the file.
    - ``threads``: the number of threads that a call uses.
    """

    def __init__(
        self,
        container: Container,
        machine: Any,
        library: ctypes.CDLL,
        threads: int,
        gpu: GpuTensors | None = None,
    ) -> None:
        self.manifest: Mapping[str, Any] = container.manifest
        self.inputs: Sequence[Mapping[str, Any]] = container.manifest["inputs"]
        self._machine = machine
        self._forward = machine["forward"]
        self._ffi = ffi()
        self._view = self._ffi.get_global_func("runtime.TVMTensorCreateView")
        self._lock = Lock()
        self._served: set[tuple[int, ...]] = set()
        self._gpu = gpu
        # TVM may ask for the machine code of kernels as late as at the first call.
        self._unloaded = None if gpu is None else container
        weights = weights_of(container, _checksum_of(library))
        self._weights = [self._tensor(a, dtype) for a, dtype in weights]
        self.threads = int(library.tvmbridge_use_threads(threads))

    def __repr__(self) -> str:
        given = ", ".join(f"{s['name']}: {s['dtype']}{_sizes(s)}" for s in self.inputs)
        return f"<function {self.manifest['name']}({given})>"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the results of forward, for arrays of NumPy or objects with ``__dlpack__``.

        Results are arrays of NumPy, in the structure that forward returns. NumPy has no bfloat16,
        so results of this dtype are tensors of tvm_ffi. Code for GPUs takes tensors on its GPU, or
        copies arrays there, and returns tensors of tvm_ffi. It runs on tvm_ffi's current stream.

        Raises:
            ArgumentError: an argument is missing, or has another shape or dtype.
        """
        given = self._in_order(arguments, named)
        arrays = [self._argument(v, spec) for v, spec in zip(given, self.inputs, strict=True)]
        sizes = sizes_of(self.manifest, [a.shape for a in arrays])
        tensors = [
            self._tensor(a, spec["dtype"]) for a, spec in zip(arrays, self.inputs, strict=True)
        ]
        symbols = [self._ffi.Shape(sizes)] if sizes is not None else []
        with self._lock:
            if sizes is not None:
                self._release_others(tuple(sizes))
            if self._gpu is not None:
                self._gpu.follow_stream()
            results = self._run(*tensors, *self._weights, *symbols)
            found = [self._result(r, s) for r, s in zip(results, self._outputs(), strict=True)]
        self._check(found)
        return rebuilt(self.manifest["structure"], found)

    def _run(self, *arguments: Any) -> Any:
        if self._unloaded is None:
            return self._forward(*arguments)
        with machine_code_lock, machine_code(self._unloaded):
            results = self._forward(*arguments)
        self._unloaded = None
        return results

    def _release_others(self, sizes: tuple[int, ...]) -> None:
        """Return the buffers of earlier sizes to the system if these sizes are one too many."""
        if sizes in self._served:
            return
        if len(self._served) == _KEPT_SIZES:
            self._ffi.get_global_func("vm.builtin.memory_manager.clear")()
            self._served.clear()
        self._served.add(sizes)

    def _outputs(self) -> Sequence[Mapping[str, Any]]:
        return self.manifest["outputs"]

    def _in_order(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        names = [spec["name"] for spec in self.inputs]
        if len(arguments) > len(names):
            raise ArgumentError(
                f"{len(arguments)} arguments were given; the function takes {', '.join(names)}"
            )
        given = dict(zip(names, arguments, strict=False))
        for name, value in named.items():
            if name not in names:
                raise ArgumentError(
                    f"there is no argument {name!r}; the function takes {', '.join(names)}"
                )
            if name in given:
                raise ArgumentError(f"argument {name!r} was given twice")
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise ArgumentError(f"missing arguments: {', '.join(missing)}")
        return [given[name] for name in names]

    def _argument(self, value: Any, spec: Mapping[str, Any]) -> Any:
        """Return an argument as a tensor on the GPU, or as an array."""
        tensor = None if self._gpu is None else self._gpu.argument(value, spec)
        return _array(value, spec) if tensor is None else tensor

    def _tensor(self, array: Any, dtype: str) -> Any:
        if self._gpu is not None:
            is_array = isinstance(array, numpy.ndarray)
            return self._gpu.moved(array, dtype) if is_array else array
        array = aligned(array)
        tensor = self._ffi.from_dlpack(array)
        if dtype in ("bfloat16",):
            shape = self._ffi.Shape(array.shape)
            tensor = self._view(tensor, shape, self._ffi.dtype(dtype), 0)
        return tensor

    def _result(self, tensor: Any, spec: Mapping[str, Any]) -> Any:
        if self._gpu is not None:
            return self._gpu.copied(tensor) if spec["copied"] else tensor
        if spec["dtype"] not in NUMPY or spec["dtype"] == "bfloat16":
            return tensor
        array = numpy.from_dlpack(tensor)
        # A result marked as copied may share memory with an argument, a weight or another result.
        return array.copy() if spec["copied"] else array

    def _check(self, results: Sequence[Any]) -> None:
        for check in self.manifest["checks"]:
            result = results[check["output"]]
            if not bool(result if self._gpu is None else self._gpu.value(result)):
                raise RuntimeFileError(f"{check['error']}: {check['message']}")


def _sizes(spec: Mapping[str, Any]) -> str:
    return f"[{', '.join(map(str, spec['shape']))}]"


def _array(value: Any, spec: Mapping[str, Any]) -> numpy.ndarray[Any, Any]:
    """Return an argument as an array, after a check of its dtype and number of dimensions.

    Raises:
        ArgumentError: the dtype or the number of dimensions differs, or the value is no array.
    """
    name, dtype = spec["name"], spec["dtype"]
    if not isinstance(value, numpy.ndarray | numpy.generic):
        if dtype == "bfloat16" and hasattr(value, "__dlpack__"):
            return _bits(value, name)
        if not hasattr(value, "__dlpack__"):
            raise ArgumentError(
                f"argument {name!r} is a {type(value).__name__}; give an array of NumPy "
                f"({dtype}{_sizes(spec)}), or an object with __dlpack__"
            )
        try:
            value = numpy.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise ArgumentError(f"argument {name!r} cannot be read: {error}") from error
    array = numpy.asarray(value)
    if array.dtype != numpy.dtype(NUMPY[dtype]):
        raise ArgumentError(
            f"argument {name!r} has dtype {array.dtype}; the function takes {dtype}"
        )
    if array.ndim != len(spec["shape"]):
        raise ArgumentError(
            f"argument {name!r} has shape {list(array.shape)}; the function takes {spec['shape']}"
        )
    if not array.flags.writeable:
        array = array.copy()
    return array


def _bits(value: Any, name: str) -> numpy.ndarray[Any, Any]:
    """Return the bits of another library's bfloat16 tensor as an array of uint16."""
    module = ffi()
    tensor = module.from_dlpack(value)
    if str(tensor.dtype) != "bfloat16":
        raise ArgumentError(f"argument {name!r} has dtype {tensor.dtype}; it must be bfloat16")
    view = module.get_global_func("runtime.TVMTensorCreateView")
    bits = view(tensor, module.Shape(tensor.shape), module.dtype("uint16"), 0)
    return numpy.from_dlpack(bits)
