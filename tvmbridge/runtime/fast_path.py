"""What was made ready once for calls that a fast guard lets pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from tvmbridge.compiler.executable import Bound
from tvmbridge.graph_capture.memory.layouts import Strides
from tvmbridge.runtime.direct import Direct
from tvmbridge.runtime.graphed import Graphs
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.second_order import Pinned
from tvmbridge.runtime.step import Held

_Entry = TypeVar("_Entry")


@dataclass(eq=False)
class FastPath(Generic[_Entry]):
    """What calls need that the fast ``guard`` lets pass: what it has pinned, made ready once.

    ``entry``, a :class:`~.entry.CompiledEntry`, serves them. ``tensors`` are those of the module;
    as compiled code takes them they are ``bound`` for inference and ``held`` for training.
    ``graphs`` replay calls on a GPU. ``direct`` serves calls that are nothing but a call of
    compiled code, while no profiler looks. ``outdated`` is memory that calls under way may still
    read.
    """

    entry: _Entry
    guard: FastGuard
    tensors: list[torch.Tensor]
    strides: Strides
    bound: Bound | None = None
    held: Held | None = None
    pinned: Pinned | None = None
    graphs: Graphs | None = None
    direct: Direct | None = None
    outdated: list[torch.Tensor] = field(default_factory=list)

    @property
    def code(self) -> _Entry:
        """The entry whose calls it serves."""
        return self.entry
