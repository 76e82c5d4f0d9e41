"""A picture as data (nodes, edges, and groups that can be folded), and its graphviz graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import graphviz

from tvmbridge.inspect.labels import escaped, group_label
from tvmbridge.inspect.styles import CALLS, EDGE, FOLDED, GRAPH, LEGEND, NODE, Attributes

#: With more nodes than this, dot would spend more time on splines than on the rest of the layout.
_MANY_NODES = 1000
#: Automatic folding shows at most this many nodes, if there are enough groups to fold.
READABLE = 150


@dataclass(frozen=True)
class Node:
    """A node of a picture.

    - ``label``: the label as graphviz HTML.
    - ``tooltip``: the text of the tooltip.
    - ``kind``: a key of ``styles.KINDS``.
    - ``attributes``: graphviz attributes.
    - ``groups``: the names of the groups that contain the node, from the outermost to the
      innermost.
    - ``facts``: facts about the value, such as its type and bytes, by name.
    """

    name: str
    label: str
    tooltip: str
    kind: str
    attributes: Attributes
    groups: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Edge:
    """An edge from one node to another; ``head`` is the operand's position or name, if shown."""

    source: str
    target: str
    head: str | None = None


@dataclass(frozen=True)
class Frame:
    """A frame around nodes: a submodule, a branch or a function.

    - ``path``: the dotted path of a submodule; empty for other frames.
    - ``title``: the class of a submodule; empty for other frames.
    - ``depth``: the depth of a submodule, 1 for the outermost; 0 for other frames.
    """

    name: str
    label: str
    attributes: Attributes
    path: str = ""
    title: str = ""
    depth: int = 0

    @property
    def text(self) -> str:
        """The label of the frame, escaped for graphviz."""
        return graphviz.escape(": ".join(filter(None, (self.label, self.title))))


@dataclass
class Picture:
    """The nodes and edges of one or several functions.

    ``groups`` are the frames by name; ``legend`` has the text and the fill color of each entry.
    """

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    groups: dict[str, Frame] = field(default_factory=dict)
    title: str = ""
    legend: Sequence[tuple[str, str]] = ()

    def at_depth(self, depth: int) -> frozenset[str]:
        """Return the names of the groups of the submodules at a depth; 1 is the outermost."""
        return frozenset(g.name for g in self.groups.values() if g.depth == depth)

    def readable(self, most: int = READABLE) -> frozenset[str]:
        """Return the groups to fold so that at most ``most`` nodes are visible.

        If the whole picture is too large, all submodules of one depth are folded: the deepest
        depth that suffices. If no depth suffices, these are the outermost submodules.
        """
        deepest = max((g.depth for g in self.groups.values()), default=0)
        depths = range(deepest, 0, -1)
        choices = [frozenset[str](), *map(self.at_depth, depths)]
        return next((c for c in choices if len(self.folded(c).nodes) <= most), choices[-1])

    def folded(self, names: Collection[str]) -> Picture:
        """Return the picture with each of these groups drawn as one node without its content."""
        if not names:
            return self
        around = {n.name: next((g for g in n.groups if g in names), None) for n in self.nodes}
        instead = {n.name: n for n in self.folded_nodes(names)}
        seen = {name: group or name for name, group in around.items()}
        shown = [instead[group] if (group := around[n.name]) else n for n in self.nodes]
        nodes = {node.name: node for node in shown}
        edges: dict[tuple[str, str], Edge] = {}
        for edge in self.edges:
            source, target = seen[edge.source], seen[edge.target]
            if source != target:
                head = edge.head if target == edge.target else None
                edges.setdefault((source, target), Edge(source, target, head))
        return replace(self, nodes=list(nodes.values()), edges=list(edges.values()))

    def folded_nodes(self, names: Collection[str]) -> list[Node]:
        """Return the nodes that replace these groups when they are folded."""
        made: dict[str, Node] = {}
        inside = Counter(g for n in self.nodes if n.kind in CALLS for g in n.groups)
        for node in self.nodes:
            for place, name in enumerate(node.groups):
                if name in names and name not in made:
                    made[name] = _folded(self.groups[name], inside[name], node.groups[:place])
        return list(made.values())

    def digraph(self) -> graphviz.Digraph:
        """Return the graphviz graph of the picture."""
        graph = graphviz.Digraph("relax", graph_attr=GRAPH, node_attr=NODE, edge_attr=EDGE)
        if len(self.nodes) > _MANY_NODES:
            graph.graph_attr.update(splines="polyline")
        if self.title:
            graph.attr(label=graphviz.escape(self.title), labelloc="t")
        _draw(graph, self.nodes, self.groups, 0)
        for edge in self.edges:
            # Edges are added outside of the frames: an edge in a frame pulls its nodes into it.
            graph.edge(edge.source, edge.target, headlabel=edge.head)
        if self.legend:
            graph.node("legend", label=_legend(self.legend), **LEGEND)
        return graph


def _folded(group: Frame, inside: int, around: tuple[str, ...]) -> Node:
    label = group_label(group.label, group.title, inside)
    facts = {"submodule": group.path, "class": group.title, "operators": inside}
    return Node(group.name, label, group.path, "folded", FOLDED, around, facts)


def _draw(
    graph: graphviz.Digraph, nodes: Sequence[Node], groups: Mapping[str, Frame], level: int
) -> None:
    for name, inside in _runs(nodes, level):
        if name is None:
            for node in inside:
                texts = {"label": node.label, "tooltip": graphviz.escape(node.tooltip)}
                graph.node(node.name, **{**texts, **node.attributes})
            continue
        group = groups[name]
        frame = graphviz.Digraph(name, graph_attr={"label": group.text, **group.attributes})
        _draw(frame, inside, groups, level + 1)
        graph.subgraph(frame)


def _runs(nodes: Sequence[Node], level: int) -> Iterator[tuple[str | None, list[Node]]]:
    """Yield a level's groups with their nodes, by first node; None for nodes without one."""
    found: dict[str | None, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.groups[level] if len(node.groups) > level else None, []).append(node)
    yield from found.items()


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f'<TR><TD BGCOLOR="{c}">{escaped(text)}</TD></TR>' for text, c in entries)
    return f'<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="2" COLOR="#bdc1c6">{cells}</TABLE>>'
