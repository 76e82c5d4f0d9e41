"""A fast path: a generated guard with the prepared data for the calls that it accepts.

Most inference calls are direct: compiled code without gradients, random draws, writes, views or
copies. A direct call only converts its arguments, runs the code and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.compiler.executable import Bound, LoadedModule
from tvmbridge.core.locks import Lock
from tvmbridge.runtime.graphed import Graphs
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.second_order import Pinned
from tvmbridge.runtime.step import ConvertedTensors

Direct: TypeAlias = Callable[[Sequence[Any]], Any]


class Counted(Protocol):
    """An object with counters: all calls, and consecutive calls that no fast guard accepted."""

    calls: int
    slow_calls: int


def direct_call(
    counted: Counted,
    counting: Lock,
    loaded: LoadedModule,
    bound: Bound,
    leaves: int,
    inputs: Sequence[int],
    build: Callable[[list[Any]], Any],
) -> Direct | None:
    """Return a function from a call's leaves to its return value.

    None: compiled code cannot read some argument in place, so arguments must be copied.

    Args:
        loaded: the code, whose ``forward`` takes the user inputs and then the bound arguments.
        bound: the arguments that were converted once for all calls.
        inputs: the positions of the user inputs among the leaves.
    """
    if bound.missing or list(bound.as_they_are) != list(range(len(inputs))):
        return None
    held = bound.values[len(inputs) :]
    in_order = list(inputs) == list(range(leaves))

    def call(leaves: Sequence[Any]) -> Any:
        given = leaves if in_order else [leaves[i] for i in inputs]
        results = loaded.call("forward", [*given, *held])
        with counting:
            counted.calls += 1
        counted.slow_calls = 0
        return build(results)

    return call


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
