"""Leave the values that forward stores in attributes out of the results of an exported function.

A file has no module whose attributes a call could set. The values may be left out if no call
depends on them: forward assigns each such attribute before it reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.structure import children
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import OutputKind


def carried_over(captured: CapturedGraph) -> Iterator[str]:
    """Yield the attributes that forward sets and that the next call reads before it sets them."""
    for place, way in captured.convention.left.items():
        if way.into == "place" and place in captured.assumptions.values and way.number is None:
            yield ".".join(part for part in place if part)


def left_places(captured: CapturedGraph) -> range:
    """Return the places, among the user's outputs, of values that forward stores in attributes."""
    if not captured.convention.left:
        return range(0)
    results, left = children(_returned_spec(captured))
    return range(results.num_leaves, results.num_leaves + left.num_leaves)


def without_left(captured: CapturedGraph) -> CapturedGraph:
    """Return the description of a graph whose structure is that of forward's results alone."""
    dropped, results = left_places(captured), _returned_spec(captured)
    users = [o for o in captured.outputs if o.kind is OutputKind.USER]
    others = [o for o in captured.outputs if o.kind is not OutputKind.USER]
    kept = [output for place, output in enumerate(users) if place not in dropped]
    results = children(results)[0] if captured.convention.left else results
    convention = replace(captured.convention, out_spec=results, left={})
    return replace(captured, outputs=(*kept, *others), convention=convention)


def _returned_spec(captured: CapturedGraph) -> pytree.TreeSpec:
    """Return the structure of forward's results, with what it leaves in attributes.

    A graph with checks also returns changed arguments and the results of the checks.
    """
    convention = captured.convention
    more = convention.checks or convention.changed_arguments
    return children(convention.out_spec)[0] if more else convention.out_spec
