"""Executables: calls compiled functions on PyTorch's tensors, by DLPack and without a copy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack
from tvm import relax

# Compiled code loads whole vectors and does not check: a tensor that starts elsewhere would crash.
_ALIGNMENT_MASK = 63


def prepare(tensor: torch.Tensor, anywhere: bool = False) -> torch.Tensor:
    """``tensor`` if compiled code may read its memory, else a dense, aligned copy of its values.

    ``anywhere``: it is read by PyTorch's kernels alone, which take any address.
    """
    if _readable(tensor, anywhere):
        return tensor
    with torch.no_grad():
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
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


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
        self, vm: relax.VirtualMachine, unaligned: Mapping[str, Sequence[bool]] | None = None
    ) -> None:
        """``unaligned`` says for each function which arguments need not be aligned."""
        self._vm = vm
        self._unaligned = dict(unaligned or {})
        self._functions = {name: vm[name] for name in ("forward", "backward") if _has(vm, name)}
        self._lock = threading.RLock()

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
    ) -> list[torch.Tensor]:
        """Call ``name`` on tensors as they come; the results numbered ``copied`` are clones."""
        results = self.call(name, self.prepare(name, tensors, bound))
        for i in copied:
            results[i] = results[i].clone()
        return results

    def call(self, name: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """Call ``name`` on prepared arguments; the results own their memory or share it with
        an argument of which they are a view."""
        function = self._functions[name]
        with self._lock:
            results = list(function(*tensors))
        # Results are PyTorch's tensors only where an argument was one.
        if results and not isinstance(results[0], torch.Tensor):
            return [from_dlpack(r) for r in results]
        return results


def _has(vm: relax.VirtualMachine, name: str) -> bool:
    try:
        vm[name]
    except (AttributeError, ValueError):
        return False
    return True
