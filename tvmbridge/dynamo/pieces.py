"""Cut a graph of TorchDynamo before and after functions that PyTorch must run.

Before::

    graph(x, mask, v): y = v.log(); x[mask] = y; return x.sin()

After::

    piece 0 (v): v.log()    piece 1 (x, mask, y): x[mask] = y    piece 2 (x): x.sin()

There are six kinds of such functions. The number of elements that a mask selects, or that
``nonzero`` returns, is known only during a call. A write into a tensor with a gradient history must
be recorded by PyTorch's autograd. An assignment to ``.data`` gives a tensor other memory.
A collective exchanges tensors with other processes. Attention of a GPU returns the state of a
random generator beside its results, and fake tensors do not tell whether that is on the GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tvmbridge.core.collectives import is_exchange
from tvmbridge.core.torch_private import set_grad_enabled, skipped_frame, symbolic_shapes

_Run = Callable[..., Any]
_ATTENTION_ON_GPUS = {
    f"aten._scaled_dot_product_{kernel}_attention{direction}.default"
    for kernel in ("cudnn", "efficient", "flash")
    for direction in ("", "_backward")
}
# Names of functions in an assignment to ``.data``, up to PyTorch 2.14 and since then.
_ASSIGNS = "_lower_version_count_by_1", "shallow_copy_data_"


@dataclass
class _Piece:
    """Consecutive nodes of a graph.

    - ``nodes``: the nodes.
    - ``is_eager``: whether PyTorch runs them.
    - ``gradients``: whether gradients are on before the first node, and after the last one.
    - ``inputs``: the nodes before them that they use.
    - ``outputs``: those of the nodes that later nodes use.
    - ``last``: the values that no later piece uses, and that the graph does not return.
    """

    nodes: list[fx.Node]
    is_eager: bool
    gradients: tuple[bool, bool]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    last: list[fx.Node] = field(default_factory=list)


def in_pieces(
    graph_module: fx.GraphModule,
    serve: Callable[[fx.GraphModule], _Run],
    always: bool = False,
) -> _Run | None:
    """Return a function that runs the graph in pieces; None if nothing cuts the graph.

    Args:
        serve: returns the function that runs a piece. The functions between pieces run in eager
            PyTorch.
        always: whether to return a function although nothing cuts the graph.

    Raises:
        SkipFrame: the graph holds for some sizes only, so Python must run the function.
    """
    assumption = assumed_in(graph_module)
    if assumption is not None:
        raise skipped_frame(assumption)
    pieces = _cut(graph_module.graph)
    if not always and not any(piece.is_eager for piece in pieces):
        return None
    steps = []
    for piece in pieces:
        part = _module_of(graph_module, piece)
        steps.append((_eager(part, piece) if piece.is_eager else serve(part), piece))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    (output,) = graph_module.graph.find_nodes(op="output")
    constants = {n: n for n in output.all_input_nodes if n.op == "get_attr"}

    def run(*args: Any) -> Any:
        values: dict[fx.Node, Any] = dict(zip(placeholders, args, strict=True))
        values.update((n, getattr(graph_module, str(n.target))) for n in constants)
        for call, piece in steps:
            results = call(*[values[node] for node in piece.inputs])
            values.update(zip(piece.outputs, results, strict=True))
            del results
            for node in piece.last:
                del values[node]
        return fx.node.map_arg(output.args[0], lambda node: values[node])

    return run


def _cut(graph: fx.Graph) -> list[_Piece]:
    """Return the pieces of a graph in order, with their inputs and outputs."""
    pieces: list[_Piece] = []
    piece_of: dict[fx.Node, _Piece] = {}
    on = torch.is_grad_enabled()
    for node in _exchanges_together(graph):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        current = pieces[-1] if pieces else None
        exchanges, attention = _exchanges(node), _attention_of(node)
        eager = exchanges or attention is not None or runs_by_itself(node, piece_of, current)
        goes_on = exchanges and current is not None and _exchanges(current.nodes[-1])
        goes_on |= attention is not None and current is piece_of[attention]
        if current is None or ((current.is_eager or eager) and not goes_on):
            current = _Piece([], eager, (on, on))
            pieces.append(current)
        current.nodes.append(node)
        if node.target is set_grad_enabled:
            on = bool(node.args[0])
            current.gradients = current.gradients[0], on
        piece_of[node] = current
    for piece in pieces:
        used = {n: None for node in piece.nodes for n in node.all_input_nodes}
        piece.inputs = [n for n in used if piece_of.get(n) is not piece and n.op != "get_attr"]
        piece.outputs = [
            n for n in piece.nodes if any(piece_of.get(user) is not piece for user in n.users)
        ]
    kept = {n for node in graph.find_nodes(op="output") for n in node.all_input_nodes}
    for piece in reversed(pieces):
        piece.last = [n for n in (*piece.inputs, *piece.outputs) if n not in kept]
        kept.update(piece.last)
    return pieces


def _attention_of(node: fx.Node) -> fx.Node | None:
    """Return the attention of a GPU that ``node`` is one result of; None for other nodes."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and _is_gpu_attention(source) else None


def _is_gpu_attention(node: fx.Node) -> bool:
    return str(node.target) in _ATTENTION_ON_GPUS


def _module_of(graph_module: fx.GraphModule, piece: _Piece) -> fx.GraphModule:
    """Return the graph of a piece, which returns a tuple of its outputs.

    A piece sets the mode of gradients that earlier pieces have set, and sets it back at the end.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outside, (before, after) = torch.is_grad_enabled(), piece.gradients
    for node in piece.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    held = {n: None for node in piece.nodes for n in node.all_input_nodes if n.op == "get_attr"}
    if before is not outside:
        graph.call_function(set_grad_enabled, (before,))
    for node in (*held, *piece.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if after is not outside:
        graph.call_function(set_grad_enabled, (outside,))
    graph.output(tuple(copies[node] for node in piece.outputs))
    return fx.GraphModule(graph_module, graph, type(graph_module).__name__)


def runs_by_itself(
    node: fx.Node, piece_of: Mapping[fx.Node, _Piece], current: _Piece | None
) -> bool:
    """Whether PyTorch must run ``node``.

    It is a write, a function whose data decides a size, an exchange with other processes, or
    attention of a GPU.
    """
    if is_exchange(node.target) or _is_gpu_attention(node):
        return True
    if _symbols([node]) - _symbols(node.all_input_nodes):
        return True
    written: Any = node.args[0] if node.args else None
    if not (_writes(node) and isinstance(written, fx.Node)):
        return False
    is_from_before = current is None or current.is_eager or piece_of.get(written) is not current
    return _chooses_by_mask(node) or (is_from_before and _carries_a_gradient(written))


def _eager(part: fx.GraphModule, piece: _Piece) -> _Run:
    """Return the function that runs a piece in eager PyTorch."""
    forward: _Run = part.forward
    return torch.no_grad()(forward) if _exchanges(piece.nodes[0]) else forward


def _exchanges_together(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes of a graph in an order that cuts it as little as possible.

    An exchange of a tensor's memory waits until a node reads the tensor.
    """
    waiting: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _exchanges(node):
            waiting[node] = None
            continue
        changed = {*waiting, *(n for w in waiting for n in w.all_input_nodes[:1])}
        if node.op == "output" or not changed.isdisjoint(node.all_input_nodes):
            yield from waiting
            waiting = {}
        yield node


def _exchanges(node: fx.Node) -> bool:
    """Whether ``node`` is part of an assignment to ``.data``, which gives a tensor other memory."""
    name = getattr(node.target, "__name__", "")
    return node.target is torch.Tensor.set_ or any(part in name for part in _ASSIGNS)


def assumed_in(graph_module: fx.GraphModule) -> str | None:
    """Return for which sizes a graph holds only, of those that depend on data; None: for all."""
    assumption = next(filter(None, map(assumed_by, graph_module.graph.nodes)), None)
    if assumption is None:
        return None
    return f"sizes depend on data, and the graph holds for {assumption} only"


def assumed_by(node: fx.Node) -> str | None:
    """Return what TorchDynamo has assumed of a size that depends on data; None if nothing.

    For a size of 1, a dimension broadcasts or is squeezed, and forward may branch by the result's
    shape. TorchDynamo assumes that such a size is not 1.
    """
    if node.target is torch.ops.aten._assert_scalar.default:
        condition = node.args[0]
        return str(node.args[1]) if _is_of_equality(condition) else None
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    squeezed = node.args[0] if str(name) in ("squeeze", "squeeze_") and node.args else None
    example = squeezed.meta.get("example_value") if isinstance(squeezed, fx.Node) else None
    if not isinstance(example, torch.Tensor):
        return None
    places = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", range(example.dim()))
    dims = [places] if isinstance(places, int) else list(places)  # type: ignore[arg-type]
    unbacked = any(symbolic_shapes().free_unbacked_symbols(example.shape[d]) for d in dims)
    return "a squeezed dimension that is not of size 1" if unbacked else None


def _is_of_equality(condition: Any) -> bool:
    """Whether ``condition`` compares sizes, and does not check that one divides another."""
    if not isinstance(condition, fx.Node) or condition.target not in (operator.eq, operator.ne):
        return False
    computed = [condition, *condition.all_input_nodes]
    computed += [n for node in condition.all_input_nodes for n in node.all_input_nodes]
    names = {getattr(node.target, "__name__", "") for node in computed}
    return not any("mod" in name.lower() or "floordiv" in name for name in names)


def _symbols(nodes: Sequence[fx.Node]) -> set[Any]:
    """Return the symbols of sizes that depend on data, in the shapes of these values."""
    examples = [node.meta.get("example_value") for node in nodes]
    leaves = [leaf for e in examples for leaf in (e if isinstance(e, tuple | list) else [e])]
    known = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | torch.SymInt)]
    return {s for leaf in known for s in symbolic_shapes().free_unbacked_symbols(leaf)}


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = str(name).endswith("_") and not str(name).endswith("__")
    return node.target is operator.setitem or in_place


def _chooses_by_mask(node: fx.Node) -> bool:
    """Whether the write ``node`` sets as many values as a mask has true elements."""
    if len(node.args) < 3:
        return False
    where, value = node.args[1:3]
    return not _is_one(value) and any(_is_mask(each) for each in _nodes_in(where))


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _nodes_in(each)


def _is_mask(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.dtype in (torch.bool, torch.uint8)


def _is_one(value: Any) -> bool:
    """Whether ``value`` is a single number, which a write broadcasts to all selected elements."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    return not isinstance(example, torch.Tensor) or all(
        type(size) is int and size == 1 for size in example.shape
    )


def _carries_a_gradient(written: Any) -> bool:
    """Whether ``written``, the target of a write, has a gradient history."""
    if not isinstance(written, fx.Node):
        return False
    example = written.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.requires_grad and not example.is_leaf
