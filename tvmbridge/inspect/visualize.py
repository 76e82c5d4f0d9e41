"""Draw Relax functions with graphviz."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import graphviz
import torch
import tvm
from torch import fx
from tvm import relax

from tvmbridge.coloring import Coloring
from tvmbridge.inspect.asked import (
    NodeAttributes,
    Surroundings,
    check_names,
    handle,
    node_attributes,
)
from tvmbridge.inspect.drawing import FunctionDrawing
from tvmbridge.inspect.lifetimes import draw_lifetimes
from tvmbridge.inspect.picture import Frame, Picture
from tvmbridge.inspect.places import places
from tvmbridge.inspect.styles import FUNCTION_FRAME, KINDS, NAMES, Attributes
from tvmbridge.passes.fx.base import LEAVES, is_operator

_NO_ATTRIBUTES: Mapping[Any, Mapping[str, Any]] = MappingProxyType({})


def visualize(
    mod_or_function: tvm.IRModule | relax.Function | fx.GraphModule,
    *,
    collapse_small: bool = True,
    node_attr_dict: Mapping[Any, Mapping[str, Any]] = _NO_ATTRIBUTES,
    coloring: Coloring | None = None,
    groups: bool = True,
    fold: int | Collection[str] | None = None,
    legend: bool = True,
    memory: bool = False,
) -> graphviz.Digraph:
    """Draw a Relax function, or every Relax function of a module with a frame around each.

    Inputs and outputs are ellipses. Calls are boxes with the operator's name, its attributes, and
    the result's variable and type. Values of a submodule are in a frame with its name and class.
    Inputs that nothing reads are left out, and the title counts them. A tooltip has the full text
    of a label that was shortened.

    `dot` is not run: look at `.source`, or call `.render()` or `.pipe()` of the result.

    Args:
        mod_or_function: A `relax.Function`, or an `IRModule` that holds at least one. A
            `torch.fx.GraphModule` is drawn too; the other arguments have no effect on it.
        collapse_small: Whether small constants, shapes, numbers and tuple items are written inside
            the node that uses them. Each item of a returned tuple is then an output of its own.
            False draws a node for every expression.
        node_attr_dict: graphviz attributes that override a node's own attributes, as
            `{variable: {"fillcolor": "lightblue"}}`. A key is a variable, an expression bound to
            one, or a variable's name; `"function/variable"` names it in one function of a module.
            Relax expressions that are not in the drawing are ignored. A small value with
            attributes of its own is drawn as a node; a tuple item only if its attributes differ
            from the tuple's.
        coloring: The coloring of a joint function (`tvmbridge.coloring.color`). Forward is red,
            and backward is blue. Values that forward keeps for backward are yellow. Values that
            both compute have both colors and a dashed line. `node_attr_dict` overrides the colors.
        groups: Whether a frame is drawn around the values of each submodule of the PyTorch module.
            A value that a pass has added is in the frame of the values that read it.
        fold: The submodules that are drawn as one node each: a depth (1 is the outermost), or
            dotted paths.
        legend: Whether a legend explains the colors.
        memory: Draw the lifetimes of the buffers of compiled code on the CPU instead of operators:
            a row for each piece of memory, a column for each step. The arguments above, except
            the first, have no effect then.

    Raises:
        TypeError: An argument, a key or a value has the wrong type.
        ValueError: The module has no Relax function; no variable has a name that is a key; there
            is no submodule to fold at that depth or with that path; or `memory` is True and every
            function has a symbolic size.
    """
    if isinstance(mod_or_function, fx.GraphModule):
        return draw_graph_module(mod_or_function)
    if memory:
        return draw_lifetimes(_relax_functions(mod_or_function))
    drawn = picture_of(
        mod_or_function,
        collapse_small=collapse_small,
        node_attr_dict=node_attr_dict,
        coloring=coloring,
        groups=groups,
    )
    names = frozenset[str]() if fold is None else _folds(drawn, fold)
    return replace(drawn.folded(names), legend=drawn.legend if legend else ()).digraph()


def picture_of(
    mod_or_function: tvm.IRModule | relax.Function,
    *,
    collapse_small: bool = True,
    node_attr_dict: Mapping[Any, Mapping[str, Any]] = _NO_ATTRIBUTES,
    coloring: Coloring | None = None,
    groups: bool = True,
    seconds: Mapping[relax.Var, float] = MappingProxyType({}),
    gradients: Mapping[int, str] = MappingProxyType({}),
) -> Picture:
    """Return the picture that :func:`visualize` draws, as data.

    Args:
        seconds: for each variable whose time was measured, the seconds that its call takes.
        gradients: for each result that is a gradient, by its number, the name of its parameter or
            input.
    """
    functions = _relax_functions(mod_or_function)
    if not isinstance(collapse_small, bool):
        raise TypeError(f"collapse_small is True or False, not {collapse_small!r}")
    attributes = node_attributes(node_attr_dict)
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
            known=Surroundings(places(function) if groups else {}, seconds, gradients),
        )
        for number, (name, function) in enumerate(functions.items())
    ]
    for drawing, function in zip(drawings, functions.values(), strict=True):
        drawing.draw(function)
    check_names(attributes.names, (name for drawing in drawings for name in drawing.names))
    drawn = _assembled(drawings) if in_module else _alone(drawings[0])
    return replace(drawn, legend=_legend(drawn, coloring is not None))


def _folds(drawn: Picture, fold: int | Collection[str]) -> frozenset[str]:
    """Return the names of the groups that ``fold`` selects, by depth or by paths."""
    if isinstance(fold, int):
        names = drawn.at_depth(fold)
        if not names:
            raise ValueError(f"fold={fold}: no submodule stands at that depth")
        return names
    wanted = {fold} if isinstance(fold, str) else set(fold)
    unknown = wanted - {group.path for group in drawn.groups.values() if group.depth}
    if unknown:
        raise ValueError(f"fold: no drawn submodule is called {', '.join(sorted(unknown))}")
    return frozenset(g.name for g in drawn.groups.values() if g.depth and g.path in wanted)


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


def _alone(drawing: FunctionDrawing) -> Picture:
    drawn = drawing.picture
    return replace(drawn, title=_titled(drawing.name or "function", drawn.title))


def _titled(name: str, remark: str) -> str:
    return f"{name} ({remark})" if remark else name


def _assembled(drawings: list[FunctionDrawing]) -> Picture:
    """Combine the functions of a module into one picture, with a frame around each."""
    whole = Picture()
    for number, drawing in enumerate(drawings):
        drawn, frame = drawing.picture, f"cluster_{number}"
        label = _titled(drawing.name, drawn.title)
        whole.groups[frame] = Frame(frame, label, FUNCTION_FRAME)
        whole.groups.update(drawn.groups)
        whole.nodes += [replace(n, groups=(frame, *n.groups)) for n in drawn.nodes]
        whole.edges += drawn.edges
    return whole


def _legend(drawn: Picture, colored: bool) -> list[tuple[str, str]]:
    """Return the entries of the legend: a text and a fill color for each kind in the picture."""
    shown = {node.kind for node in drawn.nodes}
    fills = {node.attributes.get("fillcolor") for node in drawn.nodes}
    entries = []
    if colored:
        entries = [(text, color) for text, color in COLOR_NAMES if color in fills]
        shown -= {"op", "tir", "packed", "aten"}  # their fill is the color of the coloring
    if any(group.depth for group in drawn.groups.values()):
        shown.add("folded")
    entries += [(t, KINDS[k].get("fillcolor", "#ffffff")) for k, t in NAMES.items() if k in shown]
    return entries


FORWARD = {"fillcolor": "#f4b6b0", "color": "#c0392b"}
RESIDUAL = {"fillcolor": "#f9e08b", "color": "#b7950b", "penwidth": "2"}
BACKWARD = {"fillcolor": "#aecdf2", "color": "#2460a7"}
REPEATED = {"fillcolor": "#f4b6b0:#aecdf2", "color": "#7d3c98", "style": "filled,dashed"}

#: The legend's text for each fill color.
COLOR_NAMES = (
    ("forward", FORWARD["fillcolor"]),
    ("kept for backward", RESIDUAL["fillcolor"]),
    ("backward", BACKWARD["fillcolor"]),
    ("computed by both", REPEATED["fillcolor"]),
)


def node_colors(coloring: Coloring) -> dict[Any, Attributes]:
    """Return the graphviz attributes of each variable of a joint function.

    Forward is red, and backward is blue. Values that are kept for backward are yellow with a thick
    line. Values that both forward and backward compute are red and blue with a dashed line.
    """
    colors: dict[Any, Attributes] = {b.var: BACKWARD for b in coloring.backward}
    colors |= {b.var: FORWARD for b in coloring.forward}
    colors |= dict.fromkeys(coloring.repeated, REPEATED)
    colors |= dict.fromkeys((*coloring.residuals, *coloring.drawn), RESIDUAL)
    return colors


_ENDS = {"shape": "ellipse", "style": "filled", "fillcolor": "#e8eef7"}
_STEPS = {"shape": "box", "style": "rounded,filled", "fillcolor": "#ffffff"}
_MOST_WEIGHTS = 3


def draw_graph_module(graph_module: fx.GraphModule) -> graphviz.Digraph:
    """Draw the graph without running `dot`; the weights of an operator share one node."""
    drawn = graphviz.Digraph()
    drawn.attr("graph", rankdir="TB")
    drawn.attr("node", fontname="Helvetica,sans-Serif", fontsize="11")
    weights = {n for n in graph_module.graph.nodes if _is_weight(n)}
    for node in graph_module.graph.nodes:
        if node in weights or (node.op == "placeholder" and not node.users):
            continue
        style = _STEPS if node.op.startswith("call") else _ENDS
        drawn.node(node.name, _label(node), **style)
        for each in node.all_input_nodes:
            if each not in weights:
                drawn.edge(each.name, node.name)
        own = [n.name for n in node.all_input_nodes if n in weights]
        if own:
            shown = own[:_MOST_WEIGHTS] + [f"and {len(own) - _MOST_WEIGHTS} more"] * (
                len(own) > _MOST_WEIGHTS
            )
            drawn.node(f"weights of {node.name}", "\n".join(shown), shape="plaintext")
            drawn.edge(f"weights of {node.name}", node.name, style="dashed")
    return drawn


def _is_weight(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and str(node.target).startswith(("p_", "b_", "c_"))


def _label(node: fx.Node) -> str:
    target: Any = node.target
    name = str(target)
    if is_operator(node):
        name = target._schema.name.partition("::")[2]
    elif callable(target):
        name = getattr(target, "__name__", name)
    elif node.op in LEAVES:
        name = node.name
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = "×".join(str(s) for s in value.shape)
        return f"{name}\n{sizes}"
    return name
