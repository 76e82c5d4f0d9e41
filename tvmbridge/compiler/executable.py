"""Call compiled functions on PyTorch tensors, by DLPack and without copies."""

from __future__ import annotations

import atexit
import copy
import ctypes
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack
from tvm import relax

from tvmbridge.backends import backend_of, is_on_host
from tvmbridge.compiler.build import RELEASE
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.core.borrowed import borrowed
from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.locks import Lock
from tvmbridge.core.profiling import profiling
from tvmbridge.kernels.allocation import take_back
from tvmbridge.kernels.titles import kernels_told
from tvmbridge.passes.relax.lift_frozen import TRANSFORM

# Compiled code loads aligned vectors without a check: a tensor at another address would crash it.
_ALIGNMENT_MASK = 63
_CPU = torch.device("cpu")

# The residuals of one forward call: the array that compiled code returned, or PyTorch tensors.
Residuals: TypeAlias = tvm_ffi.Array | tuple[torch.Tensor, ...]


def tensors_of(residuals: tvm_ffi.Array) -> list[torch.Tensor]:
    """Return ``residuals`` as PyTorch tensors."""
    return _as_torch(residuals, ())


def lent_tensors(residuals: tvm_ffi.Array) -> tuple[torch.Tensor, ...]:
    """Return ``residuals`` as tensors on their memory, which they do not keep alive.

    :func:`tensors_of` copies what is not in memory of PyTorch's allocator, such as a constant.
    """
    return tuple(borrowed(t) if t.numel() else t for t in _on_their_memory(residuals))


def _as_torch(results: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Return results of compiled code with PyTorch tensors in place of TVM's."""
    return take_back(_on_their_memory(results), arguments)


def _on_their_memory(results: Sequence[Any]) -> list[Any]:
    return [from_dlpack(r) if isinstance(r, tvm_ffi.Tensor) else r for r in results]


def prepare(tensor: Any, anywhere: bool = False) -> Any:
    """Return ``tensor`` if compiled code can read its memory, else a dense, aligned copy.

    Args:
        tensor: a tensor, or residuals: a TVM array or an item of it, which is returned unchanged,
            or a tuple of tensors.
        anywhere: whether only PyTorch's kernels read it, which take unaligned addresses.
    """
    if isinstance(tensor, tvm_ffi.Array | tvm_ffi.Tensor):
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


class Bound:
    """Arguments that are converted once for many calls.

    - ``values``: the converted arguments by position; None for an argument that each call gives.
    - ``as_they_are``: the positions of arguments that each call gives and that need no conversion.
    - ``missing``: the positions of the other arguments that each call gives.
    """

    def __init__(self, values: list[Any], as_they_are: Sequence[int] = ()) -> None:
        self.values = values
        self.as_they_are = tuple(as_they_are)
        bound = set(as_they_are)
        self.missing = [i for i, v in enumerate(values) if v is None and i not in bound]


class LoadedModule:
    """The functions of a loaded executable.

    Calls from several threads run one at a time, since a VirtualMachine holds the state of a call.
    """

    def __init__(
        self,
        vm: relax.VirtualMachine,
        unaligned: Mapping[str, Sequence[bool]] | None = None,
        device: torch.device = _CPU,
        gradients: Pieces | None = None,
    ) -> None:
        """Wrap the functions of ``vm``.

        Args:
            unaligned: for each function, which arguments need not be aligned.
            gradients: how to cut the results of backward into gradients; None: they need no cut.
        """
        self._vm = vm
        self._unaligned = dict(unaligned or {})
        self._functions = {
            name: backend_of(device).on_stream(vm[name], device)
            for name in ("forward", "backward", TRANSFORM)
            if _has(vm, name)
        }
        self._gradients = gradients
        self._on_host = is_on_host(device)
        # A call on the CPU in inference would take a tenth longer.
        releases = "backward" in self._functions or not self._on_host
        self._release = vm[RELEASE] if releases and _has(vm, RELEASE) else None
        self._lock = Lock(reentrant=True)
        if backend_of(device).stays_at_exit:
            stays_at_exit(self)

    def at(self, sizes: Sequence[int]) -> LoadedModule:
        """Return this symbolic module with ``sizes`` as the last argument of each call."""
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
        """Convert arguments that are the same in many calls.

        The result has the addresses of the tensors but does not keep their memory alive; the caller
        must make sure that the tensors still exist. ``torch.utils.swap_tensors`` counts references
        to a tensor and its storage, and so does the check before a parameter is moved into a pack:
        a converted argument must not be one of them. A tensor that would need a copy is not
        converted, since its values may change between calls.

        Args:
            held: the tensors by the position of the argument.
            count: the number of arguments of the function.
            as_they_are: positions of arguments that are results of compiled code, which need no
                conversion.
        """
        loose = self._loose(name, count)
        values: list[Any] = [None] * count
        for i, tensor in held.items():
            if _readable(tensor, loose[i]) and tensor.nbytes:
                values[i] = tvm_ffi.from_dlpack(borrowed(tensor))
        return Bound(values, as_they_are)

    def readable(self, name: str, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return which of ``tensors``, the first arguments of ``name``, need no copy."""
        loose = self._loose(name, len(tensors))
        return [i for i, t in enumerate(tensors) if _readable(t, loose[i])]

    def prepare(self, name: str, tensors: Sequence[Any], bound: Bound | None = None) -> list[Any]:
        """Return the arguments for ``name``: copies of ``tensors`` that it cannot read directly.

        Arguments in ``bound`` replace the tensors at their positions.
        """
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
        """Prepare ``tensors`` and call ``name`` on them; clone the results numbered ``copied``."""
        results = self.call(name, self.prepare(name, tensors, bound))
        for i in copied:
            results[i] = results[i].clone()
        return results

    def call(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Call ``name`` on prepared arguments.

        Results are PyTorch tensors, except residuals, which stay a TVM array. A result owns its
        memory, or is a view of an argument.
        """
        function = self._functions[name]
        with self._lock:
            if profiling():
                with kernels_told(self._vm):
                    results: list[Any] = function(*tensors)[:]
            else:
                results = function(*tensors)[:]
            if self._release is not None:
                self._release()
        # TVM returns PyTorch tensors only if an argument was one.
        if not self._on_host or (results and isinstance(results[0], tvm_ffi.Tensor)):
            results = _as_torch(results, tensors)
        if self._gradients is not None and name == "backward":
            return self._gradients.of(results)
        return results


def _with_last(function: Callable[..., Any], argument: Any) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments, argument)


def _has(vm: relax.VirtualMachine, name: str) -> bool:
    try:
        vm[name]
    except (AttributeError, ValueError):
        return False
    return True


_loaded: weakref.WeakSet[Any] = weakref.WeakSet()


def stays_at_exit(module: Any) -> None:
    """Keep the code of ``module`` from being unloaded when the interpreter ends.

    TVM aborts the process if it unloads code after CUDA has shut down. The driver frees the code.
    """
    _register()
    _loaded.add(module)


@functools.cache
def _register() -> None:
    atexit.register(_pin)


def _pin() -> None:
    for module in _loaded:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
