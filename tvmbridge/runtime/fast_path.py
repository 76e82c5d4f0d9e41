"""A fast path: a generated guard with the prepared data for the calls that it accepts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.compiler.executable import Bound
from tvmbridge.runtime.direct import Direct
from tvmbridge.runtime.graphed import Graphs
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.second_order import Pinned
from tvmbridge.runtime.step import ConvertedTensors

_Entry = TypeVar("_Entry")


@dataclass(eq=False)
class FastPath(Generic[_Entry]):
    """A fast guard, and the data that is prepared once for all calls that it accepts.

    - ``entry``: the :class:`~.entry.CompiledEntry` that serves the calls.
    - ``guard``: the generated guard.
    - ``tensors``: the module's tensors.
    - ``strides``: the strides of the outputs; None: the strides of the sample.
    - ``bound``: the converted tensors for inference; None in training.
    - ``held``: the converted tensors for training; None in inference.
    - ``pinned``: addresses and mode for second derivatives; None in inference.
    - ``graphs``: replays calls as CUDA graphs; None: without graphs.
    - ``direct``: a function that only runs compiled code; None if calls need more.
    - ``outdated``: memory that calls in progress may still read.
    """

    entry: _Entry
    guard: FastGuard
    tensors: list[torch.Tensor]
    strides: Strides
    bound: Bound | None = None
    held: ConvertedTensors | None = None
    pinned: Pinned | None = None
    graphs: Graphs | None = None
    direct: Direct | None = None
    outdated: list[torch.Tensor] = field(default_factory=list)

    @property
    def code(self) -> _Entry:
        """Return the entry whose calls the path serves."""
        return self.entry
