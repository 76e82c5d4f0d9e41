"""Adoption: choose the tensors without a name in the module that become inputs of its graph.

Forward may read tensors from globals, closures, defaults, class attributes, lists and objects. If
the graph held such a tensor as a constant, the constant could become stale: writes through
``.data`` or by numpy do not change the tensor's version, so no guard would notice them.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.plain import has_plain_memory
from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.contents import all_held, is_flat
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import has_storage, storage_key
from tvmbridge.graph_capture.observe.fakes import all_tensors


@dataclass
class Adoption:
    """The tensors that a stand-in has adopted, and the ones that an observation of it finds.

    A stand-in is the copy of the user's module that is observed and traced.

    - ``adopted``: labels and tensors that the stand-in already holds.
    - ``found``: further tensors that operators read, by their ids.
    - ``watched``: the values outside the module that guards compare.
    """

    adopted: tuple[tuple[str, torch.Tensor], ...] = ()
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    watched: tuple[OutsideValue, ...] = ()

    def adoptable(
        self, module: nn.Module, leaves: Sequence[Any]
    ) -> tuple[tuple[str, torch.Tensor], ...]:
        """Return the found tensors that a stand-in of ``module`` can hold, with their labels.

        If forward derived a found tensor from another tensor (``t.data``), the result has the
        other tensor.
        """
        own = tensors_of(module)
        device = _device_of([*leaves, *own.values()])
        held = _labelled(self.watched) | {id(t): ("held", t) for t in all_tensors(module)}
        chosen: dict[int, tuple[str, torch.Tensor]] = {}
        for tensor in self.found.values():
            for label, source in self._sources(tensor, held):
                fits = has_plain_memory(source) and device in (None, source.device)
                if fits and not any(source is t for t in own.values()):
                    chosen.setdefault(id(source), (label, source))
        return tuple(chosen.values())

    def _sources(
        self, tensor: torch.Tensor, held: dict[int, tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if id(tensor) in held:
            yield held[id(tensor)]
            return
        sharing = [each for each in held.values() if _share_memory(each[1], tensor)]
        if not sharing and self._is_kept(tensor):
            yield "tensor", tensor
        yield from sharing

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether anything but ``found``, stack frames and closure cells refers to ``tensor``."""
        others = (r for r in gc.get_referrers(tensor) if r is not self.found)
        return any(not isinstance(r, types.FrameType | types.CellType) for r in others)

    def refuse_stale(self, module: nn.Module) -> None:
        """Raise if forward reads the memory of an adopted or watched tensor by another tensor.

        Such a read bypasses the graph input or guard of the adopted or watched tensor.
        """
        known = [*self.adopted, *_labelled(self.watched).values()]
        for tensor in self.found.values():
            for label, source in known:
                if source is tensor or _share_memory(source, tensor):
                    shape = tuple(source.shape)
                    raise CaptureError(
                        f"forward of {type(module).__name__} reads the tensor {label} (of shape "
                        f"{shape}) in a way that does not show what is read, so that compiled code "
                        "would miss writes into it: pass it as an argument, or register it as a "
                        "buffer"
                    )


def _labelled(values: Iterable[OutsideValue]) -> dict[int, tuple[str, torch.Tensor]]:
    """Map the id of each tensor in ``values`` to its label and itself; the first label counts."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for value in values:
        for held in [] if value.itself or is_flat(value.expected) else all_held(value.expected):
            if isinstance(held, torch.Tensor):
                found.setdefault(id(held), (value.label, held))
    return found


def _device_of(values: Iterable[Any]) -> torch.device | None:
    return next((v.device for v in values if isinstance(v, torch.Tensor)), None)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not all(has_plain_memory(t) and has_storage(t) for t in (one, other)):
        return False
    return bool(one.numel()) and storage_key(one) == storage_key(other)
