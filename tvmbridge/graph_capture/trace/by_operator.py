"""Decompose an exported program operator by operator, each distinct call once.

``run_decompositions`` of PyTorch runs the whole program twice more, under a stack of modes that
makes a node cost milliseconds. Most nodes are calls that the program has made before: a model of
48 equal layers makes each call of a layer 48 times. Here the decomposition of a call is traced
once, with PyTorch's own tracer and the same kernels and table, and its nodes are copied for every
further call of the same operator on operands with the same metadata.

    linear(x, w0, b0)               permute, mm, add for (x, w0, b0): traced
    linear(y, w1, b1), same shapes  permute, mm, add for (y, w1, b1): copied

An operator may write into a tensor that no other value shares memory with: the new value takes the
place of the old one. A program that this cannot decompose as PyTorch would is left to
``run_decompositions``: one that writes otherwise, has subgraphs, sizes that depend on data, or
tensors that are not plain. Sizes may be symbols; numbers that are computed from them are copied.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, TensorArgument

from tvmbridge.core.torch_private import FakeTensor, OpOverload, pytree, storage_key
from tvmbridge.core.torch_private.decomposing import as_run_decompositions
from tvmbridge.graph_capture.trace.operator_traces import (
    NotByOperatorError,
    OperatorTrace,
    Table,
    Traces,
    is_known_number,
    is_operand,
    is_plain,
)

logger = logging.getLogger(__name__)


# What PyTorch copies from a node to the nodes of its decomposition, as far as it is read later.
_COPIED = ("nn_module_stack", "stack_trace", "source_fn_stack", "custom")
_INPUTS = (
    InputKind.USER_INPUT,
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
)


def decomposed(program: ExportedProgram, table: Table) -> ExportedProgram:
    """Return ``program.run_decompositions(table)``, operator by operator where that is the same."""
    try:
        return _by_operator(program, table)
    except NotByOperatorError as reason:
        logger.debug("the program is decomposed as a whole: %s", reason)
    return program.run_decompositions(table)


def _by_operator(program: ExportedProgram, table: Table) -> ExportedProgram:
    _refuse_unlike(program)
    with as_run_decompositions(program.graph_module, table) as (mode, decompositions):
        if mode is None:
            raise NotByOperatorError("it has no tensors")
        graph = _Copier(Traces(decompositions)).copied(program.graph)
    graph.eliminate_dead_code()
    found = ExportedProgram(
        root={},  # A module would have its source generated for nothing.
        graph=graph,
        graph_signature=_signature(program.graph_signature, graph),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
    )
    found.graph_module.meta.update(program.graph_module.meta)
    return found


def _refuse_unlike(program: ExportedProgram) -> None:
    """Refuse a program with a node whose decomposition may depend on other nodes."""
    signature = program.graph_signature
    kinds = {spec.kind for spec in signature.output_specs}
    if kinds - {OutputKind.USER_OUTPUT}:
        raise NotByOperatorError("it writes")
    if any(spec.kind not in _INPUTS for spec in signature.input_specs):
        raise NotByOperatorError("an input is neither a tensor nor a constant")
    called = [entry.signature for entry in program.module_call_graph]
    if any(each is not None and (each.inputs or each.outputs) for each in called):
        raise NotByOperatorError("it keeps the signatures of modules")
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotByOperatorError(f"{node.op} {node.target}")
        if node.op != "call_function" or _is_of_numbers(node):
            continue
        if not isinstance(node.target, OpOverload):
            if node.target is not operator.getitem:
                raise NotByOperatorError(f"a call of {node.target}")
        elif not all(map(is_plain, pytree.tree_leaves(node.meta.get("val")))):
            raise NotByOperatorError(f"a result of {node.target} is not a plain tensor")
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor | torch.SymInt) and not is_plain(value):
            raise NotByOperatorError(f"the input {node.name} is not a plain tensor")


class _Copier:
    """Builds the graph of a decomposed program."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._graph = fx.Graph()
        # By node of the program: its nodes here, in the structure of its value.
        self._nodes: dict[fx.Node, Any] = {}
        # By node here: its fake value.
        self._values: dict[fx.Node, Any] = {}
        self._writes: dict[fx.Node, list[fx.Node]] = {}

    def copied(self, graph: fx.Graph) -> fx.Graph:
        """Return ``graph`` with its calls decomposed."""
        self._writes = writes_of(graph)
        for node in graph.nodes:
            if node.op == "call_function" and _is_of_numbers(node):
                self._nodes[node] = copy = self._graph.node_copy(node, self._nodes.__getitem__)
                self._values[copy] = node.meta.get("val")
            elif node.op == "call_function":
                self._nodes[node] = result = self._called(node)
                self._nodes.update(dict.fromkeys(self._writes.get(node, ()), result))
            elif node.op == "placeholder":
                self._nodes[node] = copy = self._graph.node_copy(node)
                copy.name = node.name  # fx gives another name to ``input`` and ``max``
                value = node.meta.get("val")
                if isinstance(value, FakeTensor) and value.constant is not None:
                    copy.meta["val"] = value = _like(value)  # its number may differ at a call
                self._values[copy] = value
            else:
                results = fx.map_arg(node.args[0], self._nodes.__getitem__)
                found = [r for r in pytree.tree_leaves(results) if isinstance(r, fx.Node)]
                if any(r.op == "placeholder" for r in found):
                    raise NotByOperatorError("an input is returned")
                self._graph.output(results).meta = dict(node.meta)
        return self._graph

    def _called(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            operand, index = node.args
            return self._nodes[operand][index]  # type: ignore[index]
        if node.target is DETACH:  # The tensor has no gradient.
            return self._nodes[node.args[0]]  # type: ignore[index]
        assert isinstance(node.target, OpOverload)
        nodes, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
        here = [self._nodes[n] if isinstance(n, fx.Node) else n for n in nodes]
        leaves = [self._values[n] if isinstance(n, fx.Node) else n for n in here]
        trace = self._traces.of(node.target, leaves, structure)
        # By value, as the tensors of a trace are told apart. A size may be no node of the program.
        pairs = zip(leaves, here, strict=True)
        operands = {id(leaf): n for leaf, n in pairs if is_operand(leaf)}
        return self._inlined(trace, list(operands.values()), node)

    def _inlined(self, trace: OperatorTrace, operands: Sequence[Any], source: fx.Node) -> Any:
        meta = {name: source.meta[name] for name in _COPIED if name in source.meta}
        given = iter(operands)
        made: dict[fx.Node, Any] = {}
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "output":
                return fx.map_arg(node.args[0], made.__getitem__)
            else:
                args = fx.map_arg(node.args, made.__getitem__)
                kwargs = fx.map_arg(node.kwargs, made.__getitem__)
                made[node] = copy = self._graph.create_node(
                    "call_function", node.target, args, kwargs, _name(node.target)
                )
                copy.meta = dict(meta)
                self._values[copy] = value = self._value(node, copy, trace)
                if "val" in node.meta:  # PyTorch records no value for a list of tensors.
                    copy.meta["val"] = value
        raise AssertionError("a graph without results")

    def _value(self, node: fx.Node, copy: fx.Node, trace: OperatorTrace) -> Any:
        """Return a fake value for ``copy``, a node made from ``node``."""
        if node not in trace.views:
            return pytree.tree_map_only(torch.Tensor, _like, node.meta["val"])
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), self._values.__getitem__)
        value = copy.target(*args, **kwargs)  # type: ignore[operator]
        return pytree.tree_map_only(torch.Tensor, _without_gradient, value)


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a node computes a number from sizes, or checks one."""
    given = (n.meta.get("val") for n in node.all_input_nodes)
    checks = node.meta.get("val") is None and all(map(is_known_number, given))
    return is_known_number(node.meta.get("val")) or (checks and bool(node.all_input_nodes))


def _name(target: Any) -> str | None:
    """Return the name that PyTorch's tracer gives to a call; None: the one of fx."""
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else None


def _without_gradient(fake: torch.Tensor) -> torch.Tensor:
    """Return ``fake``; a view of it if it requires a gradient, as views of parameters do."""
    return fake.detach() if fake.requires_grad else fake


def _like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _signature(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """Return ``signature`` with the names of the results of ``graph``."""
    specs = []
    results: Any = graph.output_node().args[0]
    for spec, result in zip(signature.output_specs, results, strict=True):
        if isinstance(spec.arg, TensorArgument):
            assert isinstance(result, fx.Node)
            spec = replace(spec, arg=TensorArgument(result.name))
        specs.append(spec)
    return ExportGraphSignature(list(signature.input_specs), specs)


DETACH = torch.ops.aten.detach_.default


def writes_of(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node that writes, the earlier nodes whose value it changes.

    Raises:
        NotByOperatorError: a node writes into other memory than that of its first operand, or a
            value that is read later shares this memory as a view, or is an input.
    """
    positions = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "output":
            for leaf in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(leaf, torch.Tensor):
                    sharing.setdefault(storage_key(leaf), []).append(node)
    same: dict[fx.Node, list[fx.Node]] = {}
    for node in filter(is_write, graph.nodes):
        written = node.args[0] if node.args else None
        if not isinstance(written, fx.Node) or not _writes_first(node.target):
            raise NotByOperatorError(f"{node.target} writes")
        chain = same.setdefault(written, [written])
        others = sharing[storage_key(written.meta["val"])]
        if others[0] is not chain[0] or chain[0].op != "call_function":
            raise NotByOperatorError(f"{node.target} writes into a view or an input")
        for other in others:
            before = other not in chain and positions[other] < positions[node]
            if before and any(positions[user] > positions[node] for user in other.users):
                raise NotByOperatorError(f"{node.target} writes into what {other} views")
        same[node] = [*chain, node]
        same.update(dict.fromkeys(chain, same[node]))
    return {node: chain[: chain.index(node)] for node, chain in same.items() if is_write(node)}


def is_write(node: fx.Node) -> bool:
    """Whether a node writes elements of a tensor; ``detach_`` writes none."""
    func = node.target
    return isinstance(func, OpOverload) and func._schema.is_mutable and func is not DETACH


def _writes_first(func: OpOverload) -> bool:
    """Whether ``func`` writes its first argument alone, and returns it."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    returned = [r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns]
    return written[0] and not any(written[1:]) and returned == [True]
