"""Add nodes, edges and frames to the picture of a function."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvmbridge.inspect import labels
from tvmbridge.inspect.asked import Surroundings
from tvmbridge.inspect.labels import DOT
from tvmbridge.inspect.picture import Edge, Frame, Node, Picture
from tvmbridge.inspect.styles import BRANCH_FRAME, KINDS, Attributes, submodule_frame


@dataclass(frozen=True)
class Operand:
    """How a value appears where it is used.

    - ``text``: the text inside the node that uses it.
    - ``nodes``: the nodes that edges come from; empty if the text alone shows the value.
    """

    text: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The result of an expression, as its node shows it.

    - ``name``: the name of the variable that it is bound to; empty if there is none.
    - ``type``: its Relax type.
    - ``asked``: the graphviz attributes that the user asked for.
    - ``var``, ``value``: the variable and the expression, if it is bound.
    """

    name: str
    type: Any
    asked: Attributes
    var: relax.Var | None = None
    value: relax.Expr | None = None


class Canvas:
    """The picture of one function while it is drawn."""

    def __init__(self, prefix: str, known: Surroundings) -> None:
        self.picture = Picture()
        self._prefix = prefix
        self._known = known
        self._count = 0
        self._frames: tuple[str, ...] = ()
        self._asked_of_node: dict[str, Attributes] = {}

    @contextmanager
    def _framed(self, label: str) -> Iterator[None]:
        """Put the nodes that are drawn in this context into a new frame."""
        outer = self._frames
        self._count += 1
        name = f"cluster_{self._prefix}{label}{self._count}"
        self.picture.groups[name] = Frame(name, label, BRANCH_FRAME)
        self._frames = (*outer, name)
        yield
        self._frames = outer

    def _around(self, var: relax.Var | None) -> tuple[str, ...]:
        """Return the frames of a variable's node: the current branches, or its submodules."""
        modules = self._known.places.get(var, ()) if var is not None else ()
        if self._frames or not modules:
            return self._frames
        names = []
        for depth, (path, title) in enumerate(modules, 1):
            # A submodule that two other submodules call has a frame in each of them.
            name = f"cluster_{self._prefix}{'/'.join(p for p, _ in modules[:depth])}"
            outer = modules[depth - 2][0] if depth > 1 else ""
            short = path.removeprefix(f"{outer}.") if outer else path
            group = Frame(name, short, submodule_frame(depth), path, title, depth)
            names.append(self.picture.groups.setdefault(name, group).name)
        return tuple(names)

    def _node(
        self,
        label: labels.Label,
        kind: str,
        asked: Attributes,
        groups: tuple[str, ...],
        facts: Mapping[str, Any],
    ) -> Operand:
        node = f"{self._prefix}n{self._count}"
        self._count += 1
        shown = {**KINDS[kind], **asked}
        self.picture.nodes.append(Node(node, label.html, label.tooltip, kind, shown, groups, facts))
        self._asked_of_node[node] = asked
        return Operand(DOT, (node,))

    def _edges(self, operands: Sequence[Operand], node: str, places: Sequence[str]) -> None:
        """Add an edge from each node that is read, with the operand's position at its head."""
        sources = [
            (source, place)
            for place, operand in zip(places or [""] * len(operands), operands, strict=True)
            for source in operand.nodes
        ]
        read: dict[str, list[str]] = {}
        for number, (source, place) in enumerate(sources):
            read.setdefault(source, []).append(place or str(number))
        for source, found in read.items():
            head = ",".join(found) if places or len(sources) > 1 else None
            self.picture.edges.append(Edge(source, node, head))

    def _leave_out_unread(self, nodes: Sequence[str]) -> None:
        """Remove the nodes that nothing reads, unless the user gave attributes for them."""
        read = {edge.source for edge in self.picture.edges}
        dropped = {n for n in nodes if n not in read and not self._asked_of_node[n]}
        self.picture.nodes = [n for n in self.picture.nodes if n.name not in dropped]
        inputs = f"{len(dropped)} input{'s' * (len(dropped) > 1)}"
        self.picture.title = f"{inputs} that nothing reads left out" if dropped else ""
