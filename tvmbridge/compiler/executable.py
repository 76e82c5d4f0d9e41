"""The runtime: calls compiled functions on PyTorch's tensors, by DLPack and without a copy."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.utils.dlpack import from_dlpack
from tvm import relax

# Compiled code loads whole vectors and does not check: a tensor that starts elsewhere would crash.
_ALIGNMENT_MASK = 63


def prepare(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if compiled code may read its memory, else a dense, aligned copy of its values."""
    if tensor.is_contiguous() and not tensor.data_ptr() & _ALIGNMENT_MASK and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        return tensor.clone(memory_format=torch.contiguous_format).resolve_neg()


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

    def prepare(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tensors`` as ``name`` may read them: those that it cannot are copied."""
        loose = self._unaligned.get(name) or [False] * len(tensors)
        return [
            t if anywhere and t.is_contiguous() and not t.is_neg() else prepare(t)
            for t, anywhere in zip(tensors, loose, strict=True)
        ]

    def run(
        self, name: str, tensors: Sequence[torch.Tensor], copied: Collection[int] = ()
    ) -> list[torch.Tensor]:
        """Call ``name`` on tensors as they come; the results numbered ``copied`` are clones."""
        results = self.call(name, self.prepare(name, tensors))
        for i in copied:
            results[i] = results[i].clone()
        return results

    def call(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call ``name`` on prepared tensors; the results own their memory or share it with
        an argument of which they are a view."""
        function = self._functions[name]
        with self._lock:
            results = list(function(*tensors))
        # Results are PyTorch's tensors only where an argument was one.
        return results if tensors else [from_dlpack(r) for r in results]


def _has(vm: relax.VirtualMachine, name: str) -> bool:
    try:
        vm[name]
    except (AttributeError, ValueError):
        return False
    return True
