"""Run the code of an exported function on an NVIDIA GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from tvmbridge_runtime.container import Container
from tvmbridge_runtime.errors import ArgumentError, MachineError
from tvmbridge_runtime.libraries import ffi, library_paths
from tvmbridge_runtime.locks import Lock

CUDA = 2
_CPU = 1
_LIBRARY = "libtvm_runtime_cuda.so"
# Numbers of attributes in TVM: whether a device exists, and its compute capability.
_EXISTS, _CAPABILITY = 0, 4
_COMPILE = "tvm_callback_cuda_compile"
# Held while TVM may ask for machine code.
machine_code_lock = Lock()


def check_gpu(target: Mapping[str, Any], number: int) -> None:
    """Load TVM's CUDA runtime; check that the GPU ``number`` exists and can run the code.

    Raises:
        MachineError: there is no runtime, no such GPU, or the GPU has another architecture.
    """
    module = ffi()
    path = library_paths()[0].with_name(_LIBRARY)
    try:
        _load(path)
    except OSError as error:
        raise MachineError(
            f"the code is for NVIDIA's GPUs, and {path} cannot be loaded: {error}"
        ) from error
    attribute = module.get_global_func("runtime.GetDeviceAttr")
    if not attribute(CUDA, number, _EXISTS):
        raise MachineError(f"the code is for {target['gpu']}, and there is no GPU {number}")
    major, _, minor = str(attribute(CUDA, number, _CAPABILITY)).partition(".")
    wanted = int("".join(c for c in target["gpu"] if c.isdigit()))
    if int(major) != wanted // 10 or int(minor) < wanted % 10:
        raise MachineError(
            f"the code is for {target['gpu']}, and GPU {number} is sm_{major}{minor}: export it "
            f'with target="cuda -arch=sm_{major}{minor}"'
        )


def _load(path: Path) -> None:
    """Load TVM's CUDA runtime, with NVIDIA's package of its run-time if the system has none."""
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError:
        spec = importlib.util.find_spec("nvidia")
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
        found = [p for f in folders for p in sorted(Path(f).glob("*/lib/libcudart.so.*"))]
        for library in found:
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        if not found:
            raise
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


@contextmanager
def machine_code(container: Container) -> Iterator[None]:
    """Give TVM the machine code of a file where it asks for a compiler of CUDA source.

    The caller holds ``machine_code_lock``.
    """
    module = ffi()
    code = bytes(container.section("cubin"))
    before = module.get_global_func(_COMPILE, allow_missing=True)
    module.register_global_func(_COMPILE, lambda *_: code, override=True)
    try:
        yield
    finally:
        if before is None:
            module.registry.remove_global_func(_COMPILE)
        else:
            module.register_global_func(_COMPILE, before, override=True)


class GpuTensors:
    """The tensors of one GPU.

    - ``number``: the number of the GPU.
    """

    def __init__(self, number: int) -> None:
        self._ffi = ffi()
        self._device = self._ffi.device("cuda", number)
        self.number = number
        find: Callable[[str], Any] = self._ffi.get_global_func
        self._allocate = find("runtime.TVMTensorAllocWithScope")
        self._copy_bytes = find("runtime.TVMTensorCopyFromBytes")
        self._copy = find("runtime.TVMTensorCopyFromTo")
        self._wait = find("runtime.Device_StreamSync")
        self._stream: int | None = None

    def moved(self, array: numpy.ndarray[Any, Any], dtype: str) -> Any:
        """Return a tensor on the GPU with the bits of an array."""
        array = numpy.ascontiguousarray(array)
        tensor = self._empty(array.shape, dtype)
        if array.nbytes:
            place = ctypes.c_void_p(array.ctypes.data)
            self._copy_bytes(tensor, place, array.nbytes)
        return tensor

    def copied(self, tensor: Any) -> Any:
        """Return a copy of a tensor."""
        result = self._empty(tensor.shape, str(tensor.dtype))
        self._copy(tensor, result)
        return result

    def follow_stream(self) -> None:
        """Wait for the stream of the last call, whose buffers a call on another stream uses."""
        stream = int(self._ffi.get_raw_stream(self._device))
        if self._stream not in (None, stream):
            self._wait(self._device, self._stream)
        self._stream = stream

    def value(self, tensor: Any) -> int:
        """Return the value of a tensor of one byte, after all work on the GPU."""
        place = (ctypes.c_uint8 * 1)()
        self._ffi.get_global_func("runtime.TVMTensorCopyToBytes")(
            tensor, ctypes.cast(place, ctypes.c_void_p), 1
        )
        return int(place[0])

    def _empty(self, shape: Sequence[int], dtype: str) -> Any:
        size = self._ffi.Shape([int(n) for n in shape])
        return self._allocate(size, self._ffi.dtype(dtype), self._device, None)

    def argument(self, value: Any, spec: Mapping[str, Any]) -> Any:
        """Return an object with ``__dlpack__`` on the GPU as a tensor; None if it is elsewhere.

        Raises:
            ArgumentError: the dtype differs, or the memory is not contiguous or not aligned.
        """
        where = getattr(value, "__dlpack_device__", None)
        if where is None or isinstance(value, numpy.ndarray):
            return None
        kind, number = where()
        if int(kind) == _CPU:
            return None
        name = spec["name"]
        if (int(kind), int(number)) != (CUDA, self.number):
            raise ArgumentError(
                f"argument {name!r} is not on GPU {self.number}, as the function is"
            )
        tensor = self._ffi.from_dlpack(value)
        if str(tensor.dtype) != spec["dtype"]:
            raise ArgumentError(
                f"argument {name!r} has dtype {tensor.dtype}; the function takes {spec['dtype']}"
            )
        if len(tensor.shape) != len(spec["shape"]):
            raise ArgumentError(
                f"argument {name!r} has shape {list(tensor.shape)}; the function takes "
                f"{spec['shape']}"
            )
        if not tensor.is_contiguous():
            raise ArgumentError(f"argument {name!r} is not contiguous")
        return self.copied(tensor) if tensor.data_ptr() % 64 else tensor
