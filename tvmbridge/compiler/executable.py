"""Executables: calls compiled functions on PyTorch's tensors, by DLPack and without a copy."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack
from tvm import relax

from tvmbridge.compiler.at_exit import stays_at_exit
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.devices import gpu_index
from tvmbridge.core.profiling import profiling
from tvmbridge.core.torch_private import current_raw_stream
from tvmbridge.kernels.titles import kernels_told
from tvmbridge.passes.relax.lift_frozen import TRANSFORM

# Compiled code loads whole vectors and does not check: a tensor that starts elsewhere would crash.
_ALIGNMENT_MASK = 63
_CPU = torch.device("cpu")

# The residuals of one forward call: as compiled code returns them, or as tensors of PyTorch.
Residuals: TypeAlias = tvm_ffi.Array | tuple[torch.Tensor, ...]


def tensors_of(residuals: tvm_ffi.Array) -> list[torch.Tensor]:
    """``residuals`` as tensors of PyTorch."""
    return [r if isinstance(r, torch.Tensor) else from_dlpack(r) for r in residuals]


def prepare(tensor: Any, anywhere: bool = False) -> Any:
    """``tensor`` if compiled code may read its memory, else a dense, aligned copy of its values.

    ``anywhere``: it is read by PyTorch's kernels alone, which take any address. Residuals are
    what compiled code has returned, which it can read, or a tuple of tensors.
    """
    if isinstance(tensor, tvm_ffi.Array):
        return tensor
    if isinstance(tensor, tuple):
        return tuple(map(prepare, tensor))
    if _readable(tensor, anywhere):
        return tensor
    return without_gradients(_dense, tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).resolve_neg()


def _readable(tensor: torch.Tensor, anywhere: bool) -> bool:
    if not tensor.is_contiguous() or tensor.is_neg():
        return False
    return anywhere or not tensor.data_ptr() & _ALIGNMENT_MASK


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in the memory of ``tensor``, which it does not keep alive.

    Who holds the tensor or its memory is counted: before it is exchanged for another
    (``torch.utils.swap_tensors``), and before it is moved into a pack.
    """
    if tensor.is_cuda:
        found = torch.as_tensor(_DeviceMemory(tensor), device=tensor.device)
        return found.view(tensor.dtype).view(tensor.shape)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class _DeviceMemory:
    """The bytes of a tensor on a GPU, as a buffer that keeps nothing alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        data = (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": data,
            "version": 3,
        }


class Bound:
    """Arguments that were converted once: ``values`` by position, None where each call has its own.

    ``as_they_are`` are the positions of those that need no look, ``missing`` of the others.
    """

    def __init__(self, values: list[Any], as_they_are: Sequence[int] = ()) -> None:
        self.values = values
        self.as_they_are = tuple(as_they_are)
        bound = set(as_they_are)
        self.missing = [i for i, v in enumerate(values) if v is None and i not in bound]


class LoadedModule:
    """The functions of a loaded executable.

    A VirtualMachine keeps its state in itself, so calls from several threads take turns.
    """

    def __init__(
        self,
        vm: relax.VirtualMachine,
        unaligned: Mapping[str, Sequence[bool]] | None = None,
        device: torch.device = _CPU,
        gradients: Pieces | None = None,
    ) -> None:
        """``unaligned`` says for each function which arguments need not be aligned.

        ``gradients``: what backward returns is not as its caller counts it.
        """
        self._vm = vm
        self._unaligned = dict(unaligned or {})
        self._functions = {
            name: on_current_stream(vm[name], device)
            for name in ("forward", "backward", TRANSFORM)
            if _has(vm, name)
        }
        self._gradients = gradients
        self._lock = threading.RLock()
        if device.type == "cuda":
            stays_at_exit(self)

    def at(self, sizes: Sequence[int]) -> LoadedModule:
        """These functions with ``sizes``, which symbolic code takes last, in each call."""
        instance = copy.copy(self)
        shape = tvm_ffi.Shape(tuple(sizes))
        instance._functions = {n: _with_last(f, shape) for n, f in self._functions.items()}
        return instance

    def bind(
        self,
        name: str,
        held: Mapping[int, torch.Tensor],
        count: int,
        as_they_are: Sequence[int] = (),
    ) -> Bound:
        """Arguments of ``name``, of ``count``, that stay the same from call to call, by position.

        They keep their addresses, not their memory: who calls must know that the tensors are still
        there. A tensor that would have to be copied is not among them: its values may change.
        Arguments ``as_they_are`` are results of compiled code, which it can read.
        """
        loose = self._loose(name, count)
        values: list[Any] = [None] * count
        for i, tensor in held.items():
            if _readable(tensor, loose[i]) and tensor.nbytes:
                values[i] = tvm_ffi.from_dlpack(_borrowed(tensor))
        return Bound(values, as_they_are)

    def readable(self, name: str, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Which of ``tensors``, the first arguments of ``name``, it can read as they are."""
        loose = self._loose(name, len(tensors))
        return [i for i, t in enumerate(tensors) if _readable(t, loose[i])]

    def prepare(self, name: str, tensors: Sequence[Any], bound: Bound | None = None) -> list[Any]:
        """``tensors`` as ``name`` may read them: copied where it cannot; or what is ``bound``."""
        loose = self._loose(name, len(tensors))
        if bound is None:
            return [prepare(t, anywhere) for t, anywhere in zip(tensors, loose, strict=True)]
        values = bound.values.copy()
        for i in bound.as_they_are:
            values[i] = tensors[i]
        for i in bound.missing:
            values[i] = prepare(tensors[i], loose[i])
        return values

    def _loose(self, name: str, count: int) -> Sequence[bool]:
        return self._unaligned.get(name) or [False] * count

    def run(
        self,
        name: str,
        tensors: Sequence[Any],
        copied: Collection[int] = (),
        bound: Bound | None = None,
    ) -> list[Any]:
        """Call ``name`` on tensors as they come; the results numbered ``copied`` are clones."""
        results = self.call(name, self.prepare(name, tensors, bound))
        for i in copied:
            results[i] = results[i].clone()
        return results

    def call(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Call ``name`` on prepared arguments; the results own their memory or share it with
        an argument of which they are a view.

        They are tensors of PyTorch, but for residuals, which stay what compiled code returns.
        """
        function = self._functions[name]
        with self._lock:
            if profiling():
                with kernels_told(self._vm):
                    results: list[Any] = function(*tensors)[:]
            else:
                results = function(*tensors)[:]
        # Results are PyTorch's tensors only where an argument was one.
        if results and isinstance(results[0], tvm_ffi.Tensor):
            results = [from_dlpack(r) if isinstance(r, tvm_ffi.Tensor) else r for r in results]
        if self._gradients is not None and name == "backward":
            return self._gradients.of(results)
        return results


def _with_last(function: Callable[..., Any], argument: Any) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments, argument)


def on_current_stream(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``function`` of compiled code, whose kernels run on PyTorch's current stream of a GPU."""
    if device.type != "cuda":
        return function
    index = gpu_index(device)
    on_device = tvm_ffi.device("rocm" if torch.version.hip else "cuda", index)

    def call(*arguments: Any) -> Any:
        with tvm_ffi.use_raw_stream(on_device, current_raw_stream(index)):
            return function(*arguments)

    return call


def _has(vm: relax.VirtualMachine, name: str) -> bool:
    try:
        vm[name]
    except (AttributeError, ValueError):
        return False
    return True
