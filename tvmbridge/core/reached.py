"""Walk a graph of any kind: all that some nodes lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Node = TypeVar("Node")


def reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """Return the nodes ``start`` and all that ``following`` leads to, each once, depth first.

    >>> list(reached([3], lambda number: range(number)))
    [3, 2, 1, 0]
    """
    found: dict[Node, None] = {}
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting.extend(following(node))
    return found
