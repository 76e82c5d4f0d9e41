"""Direct calls: compiled code without gradients, random draws, writes, views or copies.

Most inference calls are of this kind. A direct call only converts its arguments, runs the code and
counts; everything else was checked when the fast path was built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tvmbridge.compiler.executable import Bound, LoadedModule

Direct: TypeAlias = Callable[[Sequence[Any]], Any]


class Counted(Protocol):
    """An object with counters: all calls, and consecutive calls that no fast guard accepted."""

    calls: int
    slow_calls: int


def direct_call(
    counted: Counted,
    counting: threading.Lock,
    loaded: LoadedModule,
    bound: Bound,
    leaves: int,
    inputs: Sequence[int],
    build: Callable[[list[Any]], Any],
) -> Direct | None:
    """Return a function from a call's leaves to its return value.

    None: compiled code cannot read some argument in place, so arguments must be copied.

    Args:
        counted: has the counters of calls.
        counting: the lock of the counter ``calls``.
        loaded: the code, whose ``forward`` takes the user inputs and then the bound arguments.
        bound: the arguments that were converted once for all calls.
        leaves: the number of leaves of the call's arguments.
        inputs: the positions of the user inputs among the leaves.
        build: builds the return value from the results.
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
