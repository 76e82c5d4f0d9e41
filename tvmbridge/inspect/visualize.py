"""Draws Relax functions with graphviz, in the manner in which Relay graphs used to be drawn."""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import graphviz
import tvm
from tvm import relax

from tvmbridge.coloring import Coloring
from tvmbridge.inspect.colors import node_colors
from tvmbridge.inspect.drawing import Attributes, FunctionDrawing, NodeAttributes, handle

_NO_ATTRIBUTES: Mapping[Any, Mapping[str, Any]] = MappingProxyType({})
_GRAPH_STYLE = {
    "rankdir": "TB",
    "fontname": "Helvetica",
    "fontsize": "12",
    "nodesep": "0.18",
    "ranksep": "0.32",
    "pad": "0.2",
}
_NODE_STYLE = {
    "fontname": "Helvetica",
    "fontsize": "11",
    "shape": "box",
    "style": "rounded,filled",
    "fillcolor": "#ffffff",
    "color": "#80868b",
    "margin": "0.09,0.04",
    "height": "0.2",
    "width": "0.3",
}
_EDGE_STYLE = {
    "fontname": "Helvetica",
    "fontsize": "8",
    "color": "#5f6368",
    "fontcolor": "#80868b",
    "arrowsize": "0.5",
    "labelangle": "-22",
    "labeldistance": "1.5",
}
#: From so many nodes on, splines would take dot longer than the whole of its layout.
_MANY_NODES = 1000


def visualize(
    mod_or_function: tvm.IRModule | relax.Function,
    *,
    collapse_small: bool = True,
    node_attr_dict: Mapping[Any, Mapping[str, Any]] = _NO_ATTRIBUTES,
    coloring: Coloring | None = None,
) -> graphviz.Digraph:
    """Draws a Relax function, or every Relax function of a module with a frame around each.

    Inputs and outputs are ellipses, calls are boxes that carry the operator's name, the attributes
    that are set, and the result's variable and type. `dot` is not run: look at `.source`, or call
    `.render()` or `.pipe()` of the result. A tooltip carries what a label had to shorten.

    Args:
        mod_or_function: A `relax.Function`, or an `IRModule` that holds at least one.
        collapse_small: Writes small constants, shapes, numbers and tuple items in place, inside the
            node that uses them, and draws one output for each item of a returned tuple. False
            gives every expression a node.
        node_attr_dict: graphviz attributes that override the node's own, as
            `{variable: {"fillcolor": "lightblue"}}`. A key is a variable, an expression bound to
            one, or a variable's name; `"function/variable"` names it in one function of a module.
            Relax expressions that are not in the drawing are ignored. A small value that has
            attributes of its own is drawn as a node even where it would be written in place; a
            tuple item only if they differ from the tuple's.
        coloring: The coloring of a joint function (`tvmbridge.coloring.color`): forward is drawn
            red, what it keeps for backward yellow, backward blue, and what both compute in both
            colors with a dashed line. `node_attr_dict` goes before it.

    Raises:
        TypeError: An argument, a key or a value has the wrong type.
        ValueError: The module has no Relax function, or no variable has a name that is a key.
    """
    functions = _relax_functions(mod_or_function)
    if not isinstance(collapse_small, bool):
        raise TypeError(f"collapse_small is True or False, not {collapse_small!r}")
    attributes = _node_attributes(node_attr_dict)
    if coloring is not None:
        colors = {handle(var): shown for var, shown in node_colors(coloring).items()}
        attributes = NodeAttributes(attributes.names, {**colors, **attributes.handles})
    in_module = isinstance(mod_or_function, tvm.IRModule)
    drawings = [
        FunctionDrawing(
            name,
            prefix=f"f{number}_" if in_module else "",
            collapse_small=collapse_small,
            attributes=attributes,
        )
        for number, name in enumerate(functions)
    ]
    for drawing, function in zip(drawings, functions.values(), strict=True):
        drawing.draw(function)
    _check_names(attributes.names, (name for drawing in drawings for name in drawing.names))
    return _assemble(drawings, in_module)


def _relax_functions(mod_or_function: object) -> dict[str, relax.Function]:
    if isinstance(mod_or_function, relax.Function):
        attrs = mod_or_function.attrs
        name = attrs["global_symbol"] if attrs and "global_symbol" in attrs else ""
        return {str(name): mod_or_function}
    if not isinstance(mod_or_function, tvm.IRModule):
        raise TypeError(
            "visualize draws a relax.Function or an IRModule, not "
            f"{type(mod_or_function).__name__}: pass the IRModule that was captured or compiled, "
            'or one of its Relax functions, as in mod["main"]'
        )
    found = {
        str(var.name_hint): function
        for var, function in mod_or_function.functions_items()
        if isinstance(function, relax.Function)
    }
    if not found:
        raise ValueError(
            "the IRModule has no Relax function to draw: pass the module as it was before lowering "
            "to TIR"
        )
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "main", name))}


def _node_attributes(node_attr_dict: object) -> NodeAttributes:
    if not isinstance(node_attr_dict, Mapping):
        raise TypeError(
            "node_attr_dict maps Relax expressions or variable names to graphviz attributes, and "
            f"is a {type(node_attr_dict).__name__}: pass a dict"
        )
    by_name: dict[str, Attributes] = {}
    by_handle: dict[int, Attributes] = {}
    for key, values in node_attr_dict.items():
        if not isinstance(key, str | tvm.ir.Expr):
            raise TypeError(
                f"node_attr_dict has the key {key!r} of type {type(key).__name__}: use a Relax "
                "variable, a bound expression, or a variable's name"
            )
        shown = key if isinstance(key, str) else getattr(key, "name", type(key).__name__)
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise TypeError(
                f"node_attr_dict[{shown!r}] is {values!r}: give a dict of graphviz attributes, as "
                'in {"color": "red"}'
            )
        texts = {name: str(value) for name, value in values.items()}
        if isinstance(key, str):
            by_name[key] = texts
        else:
            by_handle[handle(key)] = texts
    return NodeAttributes(by_name, by_handle)


def _check_names(wanted: Iterable[str], drawn: Iterable[str]) -> None:
    known = set(drawn)
    unknown = sorted(set(wanted) - known)
    if not unknown:
        return
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=2)]
    hint = f" (did you mean {', '.join(map(repr, dict.fromkeys(close)))}?)" if close else ""
    raise ValueError(
        f"node_attr_dict names {', '.join(map(repr, unknown))}, which no drawn function has{hint}: "
        "use the name of a variable in the printed function, or function/variable"
    )


def _assemble(drawings: list[FunctionDrawing], in_module: bool) -> graphviz.Digraph:
    graph = graphviz.Digraph(
        "relax", graph_attr=_GRAPH_STYLE, node_attr=_NODE_STYLE, edge_attr=_EDGE_STYLE
    )
    if sum(drawing.node_count for drawing in drawings) > _MANY_NODES:
        graph.graph_attr.update(splines="polyline")
    for number, drawing in enumerate(drawings):
        label = graphviz.escape(drawing.name or "function")
        if in_module:
            frame = {"label": label, "style": "rounded", "color": "#9aa0a6", "margin": "12"}
            drawing.graph.attr(**frame)
            drawing.graph.name = f"cluster_{number}"
            graph.subgraph(drawing.graph)
        else:
            graph.attr(label=label, labelloc="t")
            graph.body.extend(drawing.graph.body)
    return graph
