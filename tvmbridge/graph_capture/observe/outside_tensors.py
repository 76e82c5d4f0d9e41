"""Run forward for real without a trace in tensors outside the module, such as globals."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.standins import run_apart
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.collectives import no_exchanges
from tvmbridge.core.contents import all_held
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import TorchDispatchMode, has_storage, pytree, storage_key
from tvmbridge.graph_capture.observe.undo import current_undo


class WritesUndone(TorchDispatchMode):
    """Inside this context operators may write into the given tensors; on exit, undo these writes.

    A tensor is copied before the first write into its memory.

    Args:
        tensors: the tensors that get their values back.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unwritten: dict[Any, list[torch.Tensor]] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            if has_storage(tensor) and tensor.layout is torch.strided:
                self._unwritten.setdefault(storage_key(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and has_storage(value):
                    written = self._unwritten.pop(storage_key(value), [])
                    self._before += [(tensor, tensor.detach().clone()) for tensor in written]
        return func(*args, **(kwargs or {}))

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for tensor, before in self._before:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(before)


def run_unseen(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], autocast: Autocast = ()
) -> None:
    """Call :func:`run_apart`, and leave no copy of a tensor and no write outside the module.

    Raises:
        CaptureError: forward has kept a view of a copy of a parameter or buffer outside, or
            exchanges tensors with other processes.
    """
    undo = current_undo()
    with undo.run(), no_exchanges(), warnings.catch_warnings():
        if undo.tensors():
            with WritesUndone(undo.tensors()):
                copies = run_apart(module, args, kwargs, autocast)
        else:
            copies = run_apart(module, args, kwargs, autocast)
        undo.exchange(copies)
    memory = {storage_key(copied) for copied, _ in copies.values() if has_storage(copied)}
    for held in all_held(*undo.values()):
        if isinstance(held, torch.Tensor) and has_storage(held) and storage_key(held) in memory:
            raise CaptureError(
                f"forward of {type(module).__name__} keeps a view of a parameter or buffer outside "
                "of the module, which compiled code would not do"
            )
