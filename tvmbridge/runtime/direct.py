"""Calls of compiled code with nothing around it: no gradients, draws, writes, views or copies.

Most calls of inference are such. What these would ask of each call is known when a fast path is
made, so that a call converts its arguments, runs the code, and counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tvmbridge.compiler.executable import Bound, LoadedModule

Direct: TypeAlias = Callable[[Sequence[Any]], Any]


class Counted(Protocol):
    """Who counts calls, and those in a row that no fast guard let pass."""

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
    """A function from a call's leaves to what it returns; None where arguments are to be copied.

    Args:
        counted: counts calls, while it holds ``counting``.
        loaded: its ``forward`` takes what is ``bound``, and the leaves at ``inputs`` before it.
        bound: arguments that were converted once.
        leaves: how many there are.
        inputs: the places of user inputs among them.
        build: makes what is returned of the results.
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
