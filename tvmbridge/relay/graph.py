"""Walk a captured graph once, and write a Relay function for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.torch_private import FakeTensor, OpOverload
from tvmbridge.core.types import InputDescriptor, InputKind, OutputKind
from tvmbridge.exporting.left import left_places
from tvmbridge.exporting.leftovers import effects
from tvmbridge.frontend.origins import origin_of_node
from tvmbridge.relay.decomposed import decomposition, is_decomposed
from tvmbridge.relay.literals import type_text
from tvmbridge.relay.registry import CONVERTERS, Refused
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

HEADER = '#[version = "0.0.5"]'
_ASSERTIONS = ("aten::_assert_",)
_NONE = "?"


def write_graph(captured: CapturedGraph, version: str) -> Writer:
    """Return a writer with the whole function ``main`` of a captured graph.

    Raises:
        ExportError: the message names all operators and effects that Relay cannot say.
    """
    ctx = Writer(version)
    refused = dict.fromkeys(effects(captured))
    if captured.convention.checks:
        refused["forward checks values of tensors"] = None
    _declare_inputs(ctx, captured, refused)
    for node in captured.program.graph.nodes:
        if node.op != "call_function" or node in ctx.values:
            continue
        try:
            _convert(ctx, node)
        except Refused as reason:
            refused[f"{_named(node)}: {reason}"] = None
            ctx.values[node] = _NONE
    if refused:
        listed = "\n  ".join(refused)
        raise ExportError(
            f"the module cannot be written as Relay {version} because of:\n  {listed}\n"
            "Move these out of the module, or convert the parts around them."
        )
    return ctx


def _named(node: fx.Node) -> str:
    """Return the operator of a node, with the submodule and the line of the model."""
    source = node.args[0] if node.target is operator.getitem else node
    origin = origin_of_node(node)
    return f"{source.target}{'' if origin is None else origin.place}"  # type: ignore[union-attr]


def _declare_inputs(ctx: Writer, captured: CapturedGraph, refused: dict[str, None]) -> None:
    """Declare the user's inputs; weights are declared where they are read first."""
    nodes = {n.name: n for n in captured.program.graph.nodes}
    for described in captured.inputs:
        node = nodes[described.name]
        try:
            if described.kind is InputKind.USER:
                shape, dtype = described.spec.shape, described.spec.dtype
                ctx.values[node] = ctx.parameter(described.name, shape, dtype)
            elif described.kind is not InputKind.CONSTANT:
                ctx.weights[node] = (described.target or described.name, _held(captured, described))
        except Refused as reason:
            refused[f"argument {described.name}: {reason}"] = None
            ctx.values[node] = _NONE
    for name, tensor in captured.constant_tensors.items():
        ctx.known[nodes[name]] = tensor


def _held(captured: CapturedGraph, described: InputDescriptor) -> torch.Tensor:
    """Return the values of a tensor of the module.

    Raises:
        ExportError: the program does not hold them.
    """
    program, target = captured.program, described.target or ""
    held = {
        spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target
    }
    found = captured.outside.get(target)
    for name in (held.get(described.name, ""), target):
        for source in (program.state_dict, program.constants):
            if found is None and isinstance(source.get(name), torch.Tensor):
                found = source[name]
    if found is None or isinstance(found, FakeTensor):
        raise ExportError(f"the graph does not hold the values of {target}")
    return found


def _convert(ctx: Writer, node: fx.Node) -> None:
    target = node.target
    if target is operator.getitem:
        _take_result(ctx, node)
    elif not isinstance(target, OpOverload):
        raise Refused("it is no ATen operator")
    elif target._schema.name.startswith(_ASSERTIONS):
        return
    elif all(n in ctx.known for n in node.all_input_nodes):
        _compute(ctx, node)
    elif _NONE in (ctx.values.get(n) for n in node.all_input_nodes):
        if not is_decomposed(target):
            _check(node)
        ctx.values[node] = _NONE
    elif is_decomposed(target):
        _convert_parts(ctx, node)
    else:
        converter = _check(node)
        ctx.values[node] = converter.function(ctx, node, *node.args, **node.kwargs)


def _convert_parts(ctx: Writer, node: fx.Node) -> None:
    """Write an operator as the operators that PyTorch decomposes it into."""
    graph, operands = decomposition(node)
    inputs = iter(operands)
    for part in graph.nodes:
        if part.op == "placeholder":
            given = next(inputs)
            if given in ctx.known:
                ctx.known[part] = ctx.known[given]
            else:
                ctx.values[part] = ctx.value(given)
        elif part.op == "call_function":
            _convert(ctx, part)
        else:
            ctx.values[node] = fx.map_arg(part.args[0], lambda n: ctx.value(n))


def _take_result(ctx: Writer, node: fx.Node) -> None:
    source, index = node.args
    if source in ctx.known:
        ctx.known[node] = ctx.known[source][index]  # type: ignore[index]
        return
    results = ctx.values[source]  # type: ignore[index]
    if results == _NONE:
        ctx.values[node] = _NONE
        return
    if results[index] is None:
        raise Refused(f"its result {index}")
    ctx.values[node] = results[index]


def _compute(ctx: Writer, node: fx.Node) -> None:
    """Compute a node that depends on no input of the graph."""
    if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        raise Refused("a random draw")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: ctx.known[n])
    with torch.no_grad():
        ctx.known[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _check(node: fx.Node) -> Any:
    """Return the converter of a node.

    Raises:
        Refused: there is none, or none for these dtypes.
    """
    converter = CONVERTERS.get(node.target)  # type: ignore[call-overload]
    if converter is None:
        raise Refused("Relay has no converter for it")
    for value in _tensors(node):
        if value.dtype not in converter.dtypes:
            raise Refused(f"dtype {str(value.dtype).removeprefix('torch.')}")
        if not value.numel() and node.target is not torch.ops.aten.cat.default:
            raise Refused("an empty tensor")
    return converter


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node reads, and its first result."""
    for operand in node.all_input_nodes:
        if isinstance(operand.meta.get("val"), torch.Tensor):
            yield operand.meta["val"]
    result = node.meta["val"]
    yield result if isinstance(result, torch.Tensor) else result[0]


def results_of(captured: CapturedGraph) -> list[fx.Node]:
    """Return the nodes of all tensors that forward returns, in order.

    Values that forward stores in attributes of the module are left out.
    """
    nodes = {n.name: n for n in captured.program.graph.nodes}
    users = [o for o in captured.outputs if o.kind is OutputKind.USER]
    hidden = len(captured.convention.bases) + len(captured.convention.checks)
    left = left_places(captured)
    kept = [o for i, o in enumerate(users[: len(users) - hidden]) if i not in left]
    return [nodes[o.name] for o in kept if o.spec is not None]


def function_text(ctx: Writer, results: list[fx.Node]) -> str:
    """Return the text of the module that has the written function."""
    texts = [ctx.value(n) for n in results]
    types = [type_text(shape_of(n), dtype_of(n)) for n in results]
    result, returned = texts[0], types[0]
    if len(results) != 1:
        result, returned = f"({', '.join(texts)})", f"({', '.join(types)})"
    parameters = ", ".join(f"%{name}: {kind}" for name, kind in ctx.signature.items())
    lines = [f"  %{i} = {expression};" for i, expression in enumerate(ctx.lines)]
    body = "\n".join([*lines, f"  {result}"])
    return f"{HEADER}\ndef @main({parameters}) -> {returned} {{\n{body}\n}}\n"
