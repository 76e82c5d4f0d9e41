"""The positions where the graph may be cut, and the selection that the search considers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed.graph import PipelineGraph, origin, submodule_of, value_of, written

# The search tries no cut that more values cross; a cut by hand may have more.
_MOST_CROSSING = 8


def problem_at(graph: PipelineGraph, position: int) -> str | None:
    """Return why the graph must not be cut before ``nodes[position]``; None if it may be."""
    before, behind = graph.nodes[:position], graph.nodes[position:]
    inside = set(before)
    for node in graph.crossing(position):
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return f"{node.name} is no tensor"
        if not value.dtype.is_floating_point:
            return f"{node.name} is {value.dtype}, for which no gradient comes back"
    for node in behind:
        for target in written(node):
            if origin(target) in inside:
                return f"{node.name} writes into what {origin(target).name} made before the cut"
    read_before = {name for node in before for name in graph.read_tensors(node)}
    read_behind = {name for node in behind for name in graph.read_tensors(node)}
    for name in _written_buffers(graph) & read_before & read_behind:
        return f"buffer {name} is written on one side of the cut and read on the other"
    return None


def _written_buffers(graph: PipelineGraph) -> set[str]:
    targets = {origin(t) for node in graph.nodes for t in written(node)}
    return {str(t.target) for t in targets if t.op == "get_attr"}


def boundaries(graph: PipelineGraph, least: int) -> list[int]:
    """Return positions where a cut is legal and few values cross.

    There are at least ``least`` of them if the graph has that many. The part between two
    neighbouring positions has parameters.
    """
    counts = crossing_counts(graph)
    found: list[int] = []
    for most in range(1, _MOST_CROSSING + 1):
        found = _thinned(graph, [p for p, n in enumerate(counts) if 0 < n <= most])
        if len(found) >= least:
            break
    return found


def crossing_counts(graph: PipelineGraph) -> list[int]:
    """Return, for each node, how many values cross a cut before it."""
    last_use: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        for read in graph.reads(node):
            last_use[read] = position
    for output in graph.outputs:
        if isinstance(output, fx.Node) and output.op == "call_function":
            last_use[output] = len(graph.nodes)
    changes = [0] * (len(graph.nodes) + 2)
    for position, node in enumerate(graph.nodes):
        if node in last_use:
            changes[position + 1] += 1
            changes[last_use[node] + 1] -= 1
    counts, now = [], 0
    for position in range(len(graph.nodes)):
        now += changes[position]
        counts.append(now)
    return counts


def _thinned(graph: PipelineGraph, candidates: Sequence[int]) -> list[int]:
    """Keep the last of each run of legal candidates that have no parameters between them."""
    has_parameters = [bool(_parameters(graph, node)) for node in graph.nodes]
    found: list[int] = []
    for position in candidates:
        if problem_at(graph, position) is not None or not any(has_parameters[position:]):
            continue
        if found and not any(has_parameters[found[-1] : position]):
            found[-1] = position
        elif any(has_parameters[:position]):
            found.append(position)
    return found


def _parameters(graph: PipelineGraph, node: fx.Node) -> list[str]:
    names = graph.read_tensors(node)
    return [n for n in names if isinstance(graph.tensors[n], torch.nn.Parameter)]


def nodes_of(graph: PipelineGraph, name: str) -> list[int]:
    """Return the positions of the nodes that run in the submodule ``name``.

    Raises:
        PipelineError: no node runs in it.
    """
    found = [
        position for position, node in enumerate(graph.nodes) if _within(submodule_of(node), name)
    ]
    if not found:
        tops = sorted({submodule_of(n).partition(".")[0] for n in graph.nodes} - {""})
        raise PipelineError(f"no operator runs in submodule {name!r}; there are {', '.join(tops)}")
    return found


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def cuts_by_hand(graph: PipelineGraph, names: Sequence[str]) -> list[int]:
    """Return the positions where the submodules ``names`` begin; each of them begins a stage.

    Raises:
        PipelineError: a name is unknown, the names are not in order, or a cut is not legal there.
    """
    positions = [nodes_of(graph, name)[0] for name in names]
    if sorted(set(positions)) != positions or (positions and positions[0] == 0):
        raise PipelineError(
            f"stages begin at {', '.join(names)}, which is not the order that they run in, or the "
            "first of them begins the module; name the second stage and those behind it"
        )
    for name, position in zip(names, positions, strict=True):
        problem = problem_at(graph, position)
        if problem is not None:
            raise PipelineError(f"no stage can begin at {name}: {problem}")
    return positions
