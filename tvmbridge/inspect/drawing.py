"""Turns one Relax function into the nodes and edges of a graph."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import graphviz
from tvm import relax
from tvm.ir import Call

from tvmbridge.inspect import labels
from tvmbridge.inspect.labels import DOT

Attributes = dict[str, str]

_SHOWN_FIELDS = 4
_INPUT = {"shape": "ellipse", "style": "filled", "fillcolor": "#e8f0fe", "margin": "0.02,0.02"}
_WEIGHT = {**_INPUT, "fillcolor": "#f1f3f4"}
_FREE = {**_INPUT, "style": "filled,dashed", "fillcolor": "#ffffff"}
_OUTPUT = {**_INPUT, "fillcolor": "#d2e3fc", "peripheries": "2"}
_SMALL = {"style": "filled", "fillcolor": "#f8f9fa", "color": "#dadce0"}
_BRANCH = {"shape": "hexagon", "style": "filled", "fillcolor": "#fef7e0"}
_TUPLE = {"fillcolor": "#f3e8fd"}
_KINDS: dict[str, Attributes] = {
    "op": {},
    "function": {"fillcolor": "#e4f7fb"},
    "tir": {"fillcolor": "#e6f4ea"},
    "packed": {"fillcolor": "#fef7e0"},
    "aten": {"fillcolor": "#fce8e6"},
}


def handle(expr: relax.Expr) -> int:
    """A number that two Python objects share if they are the same Relax expression."""
    return hash(expr)  # of the TVM object: Python makes a new wrapper at each look


@dataclass(frozen=True)
class NodeAttributes:
    """The attributes that a user asked for, by variable name and by expression."""

    names: Mapping[str, Attributes]
    handles: Mapping[int, Attributes]

    def of(self, function: str, *expressions: relax.Expr) -> Attributes:
        """What was asked for these expressions: by the expression goes before by its name."""
        variables = [expr.name for expr in expressions if isinstance(expr, relax.Var)]
        found: Attributes = {}
        for name in [*variables, *(f"{function}/{name}" for name in variables)]:
            found |= self.names.get(name, {})
        for expr in expressions:
            found |= self.handles.get(handle(expr), {})
        return found


@dataclass(frozen=True)
class _Operand:
    """How a value looks where it is used: its text there, and the nodes that edges come from."""

    text: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Result:
    """What an expression is bound to, as far as a node shows it."""

    name: str
    type: Any
    asked: Attributes


class FunctionDrawing:
    """One function's nodes and edges, in a graph of its own. Call `draw` once."""

    def __init__(
        self, name: str, *, prefix: str, collapse_small: bool, attributes: NodeAttributes
    ) -> None:
        self.name = name
        self.graph = graphviz.Digraph()
        self.names: set[str] = set()
        self.node_count = 0
        self._prefix = prefix
        self._collapse = collapse_small
        self._attributes = attributes
        self._frame = self.graph
        self._values: dict[int, _Operand] = {}
        self._asked_of_node: dict[str, Attributes] = {}
        # Tuples that nothing has used yet: one that is only returned never becomes a node.
        self._waiting: dict[int, tuple[relax.Tuple, _Result]] = {}
        self._returned: set[int] = set()

    def draw(self, function: relax.Function) -> None:
        """Draws the whole function."""
        attrs = function.attrs or {}
        inputs = int(attrs["num_input"]) if "num_input" in attrs else len(function.params)
        for position, param in enumerate(function.params):
            self._note_name(param)
            style = _INPUT if position < inputs else _WEIGHT
            self._values[handle(param)] = self._variable(param, style)
        result = self._sequence(function.body)
        for expr, path, asked in self._leaves(result, (), {}):
            title = f"output {'.'.join(map(str, path))}".rstrip()
            shown = _Result("", expr.ty, asked)
            self._operation(title, [self._operand(expr)], shown, style=_OUTPUT)
        for key in [key for key in self._waiting if key not in self._returned]:
            self._values[key] = self._draw(*self._waiting.pop(key))

    def _note_name(self, var: relax.Var) -> None:
        self.names |= {var.name, f"{self.name}/{var.name}"}

    def _leaves(
        self, expr: relax.Expr, path: tuple[int, ...], asked: Attributes
    ) -> Iterator[tuple[relax.Expr, tuple[int, ...], Attributes]]:
        """The values that a function returns, with place and attributes in the returned tuples."""
        value, result = self._waiting.get(handle(expr), (expr, None))
        if not (self._collapse and isinstance(value, relax.Tuple) and value.fields):
            yield expr, path, asked
            return
        self._returned.add(handle(expr))
        asked = asked | (result.asked if result else self._attributes.of(self.name, expr))
        for position, item in enumerate(value.fields):
            yield from self._leaves(item, (*path, position), asked)

    def _sequence(self, expr: relax.Expr) -> relax.Expr:
        """Draws the bindings of a sequence, and returns its result, not yet drawn."""
        if not isinstance(expr, relax.SeqExpr):
            return expr
        for binding in [binding for block in expr.blocks for binding in block.bindings]:
            self._bind(binding)
        return expr.body

    def _bind(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        self._note_name(var)
        asked = self._attributes.of(self.name, value, var)
        result = _Result(var.name, var.ty, asked)
        if isinstance(binding, relax.MatchCast):
            operand = self._operation("match_cast", [self._operand(value)], result)
        elif self._collapse and isinstance(value, relax.Tuple):
            self._waiting[handle(var)] = (value, result)
            return
        elif self._is_in_place(value, asked):
            operand = self._operand(value)
        else:
            operand = self._draw(value, result)
        self._values[handle(var)] = operand

    def _is_in_place(self, expr: relax.Expr, asked: Attributes) -> bool:
        if not self._collapse:
            return False
        if isinstance(expr, relax.TupleGetItem):
            source = self._operand(expr.tuple_value)
        elif handle(expr) in self._values:
            source = self._values[handle(expr)]
        else:
            return not asked and labels.literal_text(expr) is not None
        return not asked or any(asked == self._asked_of_node[node] for node in source.nodes)

    def _operand(self, expr: relax.Expr) -> _Operand:
        """How `expr` looks where it is used; draws it first if it needs a node and has none."""
        if handle(expr) in self._values:
            return self._values[handle(expr)]
        waiting = self._waiting.pop(handle(expr), None)
        asked = self._attributes.of(self.name, expr)
        if waiting is not None:
            operand = self._draw(*waiting)
        elif self._is_in_place(expr, asked):
            return self._text_in_place(expr)
        elif self._collapse and isinstance(expr, relax.Tuple) and not asked:
            return self._tuple_in_place(expr)
        else:
            operand = self._draw(expr, _Result("", expr.ty, asked))
        if labels.literal_text(expr) is None:
            self._values[handle(expr)] = operand
        return operand

    def _text_in_place(self, expr: relax.Expr) -> _Operand:
        if not isinstance(expr, relax.TupleGetItem):
            return _Operand(labels.literal_text(expr) or "")
        source = expr.tuple_value
        if isinstance(source, relax.Tuple):
            return self._operand(source.fields[expr.index])
        operand = self._operand(source)
        return _Operand(f"{operand.text}[{expr.index}]", operand.nodes)

    def _tuple_in_place(self, expr: relax.Tuple) -> _Operand:
        fields = [self._operand(item) for item in expr.fields]
        texts = [item.text for item in fields]
        if len(texts) > _SHOWN_FIELDS and all(text == DOT for text in texts):
            texts = [DOT, "…", DOT]
        return _Operand(f"({', '.join(texts)})", tuple(n for item in fields for n in item.nodes))

    def _draw(self, expr: relax.Expr, result: _Result) -> _Operand:
        """Gives the expression a node of its own."""
        if isinstance(expr, Call):
            parts = labels.call_parts(expr)
            operands = [self._operand(item) for item in parts.operands]
            style = _KINDS[parts.kind]
            detail = labels.attributes_text(expr)
            return self._operation(parts.title, operands, result, detail=detail, style=style)
        if isinstance(expr, relax.If):
            return self._draw_if(expr, result)
        if isinstance(expr, relax.SeqExpr):
            return self._operand(self._sequence(expr))
        if isinstance(expr, relax.Tuple):
            return self._draw_tuple(expr, result)
        if isinstance(expr, relax.TupleGetItem):
            sources = [self._operand(expr.tuple_value)]
            return self._operation(f"item {expr.index}", sources, result, style=_TUPLE)
        if isinstance(expr, relax.Function):
            free = [self._operand(var) for var in relax.analysis.free_vars(expr)]
            return self._operation("local function", free, result, style=_KINDS["function"])
        if isinstance(expr, relax.Var) and handle(expr) in self._values:
            return self._operation("alias", [self._operand(expr)], result, style=_SMALL)
        return self._draw_leaf(expr, result)

    def _draw_tuple(self, expr: relax.Tuple, result: _Result) -> _Operand:
        fields = []
        for item in expr.fields:
            if isinstance(item, relax.Tuple):  # in place, it would hide what stands in which
                asked = self._attributes.of(self.name, item)
                fields.append(self._draw(item, _Result("", item.ty, asked)))
            else:
                fields.append(self._operand(item))
        return self._operation("tuple", fields, result, style=_TUPLE)

    def _draw_leaf(self, expr: relax.Expr, result: _Result) -> _Operand:
        title = labels.literal_text(expr) or labels.function_name(expr)
        if title is None and isinstance(expr, relax.Var):
            return self._variable(expr, _FREE)
        kind = type(expr).__name__.replace("GenericConst", "constant")
        return self._operation(title or kind, [], result, style=_SMALL)

    def _draw_if(self, expr: relax.If, result: _Result) -> _Operand:
        operands = [self._operand(expr.cond)]
        for label, branch in (("then", expr.true_branch), ("else", expr.false_branch)):
            with self._framed(label):
                operands.append(self._operand(self._sequence(branch)))
        places = ("condition", "then", "else")
        return self._operation("if", operands, result, style=_BRANCH, places=places)

    @contextmanager
    def _framed(self, label: str) -> Iterator[None]:
        """What is drawn meanwhile goes into a frame of its own."""
        outer = self._frame
        self.node_count += 1
        self._frame = graphviz.Digraph(
            f"cluster_{self._prefix}{label}{self.node_count}",
            graph_attr={"label": label, "style": "rounded,dashed", "color": "#9aa0a6"},
        )
        yield
        outer.subgraph(self._frame)
        self._frame = outer

    def _variable(self, var: relax.Var, style: Attributes) -> _Operand:
        asked = self._attributes.of(self.name, var)
        return self._node(labels.variable_label(var.name, var.ty), style, asked)

    def _operation(
        self,
        title: str,
        operands: Sequence[_Operand],
        result: _Result,
        *,
        detail: str = "",
        style: Attributes = _KINDS["op"],
        places: Sequence[str] = (),
    ) -> _Operand:
        """A node for an expression with operands, and the edges from these."""
        texts = [operand.text for operand in operands]
        label = labels.operation_label(title, texts, detail, result.name, result.type)
        node = self._node(label, style, result.asked)
        self._edges(operands, node.nodes[0], places)
        return node

    def _node(self, label: labels.Label, style: Attributes, asked: Attributes) -> _Operand:
        node = f"{self._prefix}n{self.node_count}"
        self.node_count += 1
        texts = {"label": label.html, "tooltip": graphviz.escape(label.tooltip)}
        self._frame.node(node, **{**texts, **style, **asked})
        self._asked_of_node[node] = asked
        return _Operand(DOT, (node,))

    def _edges(self, operands: Sequence[_Operand], node: str, places: Sequence[str]) -> None:
        """One edge from each node that is read, with its place among the operands at its head."""
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
            # Into the function's graph: an edge would pull its nodes into the frame it stands in.
            self.graph.edge(source, node, headlabel=head)
