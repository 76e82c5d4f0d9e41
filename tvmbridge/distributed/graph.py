"""The graph of one micro-batch, in the order of execution, and the values that may cross a cut.

A *boundary* is a position where the graph may be cut; a *part* is the section between two
boundaries. Each stage recomputes the values that depend on the inputs alone (masks, positions), so
that only values that depend on parameters cross a cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.errors import CaptureError, first_line
from tvmbridge.core.torch_private import OpOverload, pytree

_DROPPED = ("_assert_tensor_metadata", "_guards_fn", "sym_constrain_range")


@dataclass(frozen=True)
class PipelineGraph:
    """A module captured for one micro-batch.

    - ``nodes``: the nodes in the order of execution, without those in ``recomputed``.
    - ``recomputed``: the nodes that each stage computes again.
    - ``inputs``: the placeholders, in the order of the flattened arguments.
    - ``tensors``: parameters, buffers and constants, by the names that nodes read them by.
    - ``outputs``: the flattened values that forward returns; ``output_spec`` is their structure.
    """

    nodes: tuple[fx.Node, ...]
    recomputed: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...]
    tensors: Mapping[str, torch.Tensor]
    outputs: tuple[Any, ...]
    output_spec: Any
    owner: fx.GraphModule  # keeps the nodes alive

    def crossing(self, position: int) -> list[fx.Node]:
        """Return the values computed before ``nodes[position]`` and read there or later."""
        before = set(self.nodes[:position])
        found: dict[fx.Node, None] = {}
        for node in self.nodes[position:]:
            found.update((read, None) for read in self.reads(node) if read in before)
        found.update((n, None) for n in self.outputs if isinstance(n, fx.Node) and n in before)
        return list(found)

    def reads(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the values of ``nodes`` that ``node`` reads, also through recomputed nodes."""
        for read in node.all_input_nodes:
            if read.op == "call_function" and read not in self.recomputed:
                yield read

    def read_tensors(self, node: fx.Node) -> Iterator[str]:
        """Yield the names of parameters, buffers and constants that ``node`` reads directly."""
        for read in node.all_input_nodes:
            if read.op == "get_attr":
                yield str(read.target)


def capture_graph(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PipelineGraph:
    """Capture ``module`` in its current mode, for the sizes of one micro-batch.

    Raises:
        CaptureError: torch.export cannot capture it.
    """
    try:
        program = torch.export.export(module, args, dict(kwargs), strict=False)
        owner = program.module()
    except Exception as error:
        raise CaptureError(f"the module cannot be captured: {first_line(error)}") from error
    assert isinstance(owner, fx.GraphModule)
    tensors = _tensors(module, owner)
    nodes = [n for n in owner.graph.nodes if n.op == "call_function" and not _dropped(n)]
    recomputed = _recomputed(nodes, tensors)
    output = next(n for n in owner.graph.nodes if n.op == "output")
    spec = program.call_spec
    return PipelineGraph(
        nodes=tuple(n for n in nodes if n not in recomputed),
        recomputed=frozenset(recomputed),
        inputs=tuple(n for n in owner.graph.nodes if n.op == "placeholder"),
        tensors=tensors,
        outputs=tuple(pytree.tree_leaves(output.args[0])),
        output_spec=spec.out_spec,
        owner=owner,
    )


def _dropped(node: fx.Node) -> bool:
    return any(name in str(node.target) for name in _DROPPED)


def _tensors(module: nn.Module, owner: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Return the tensors that the graph reads by name: the module's own, if it has the name."""
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    found = {}
    for node in owner.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            tensor = own.get(name)
            if tensor is None:
                tensor = _attribute(owner, name)
            if not isinstance(tensor, torch.Tensor):
                raise CaptureError(f"the module has control flow as a graph of its own ({name})")
            found[name] = tensor
    return found


def _attribute(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers."""
    if isinstance(node.target, OpOverload):
        if "dropout" in node.target.name():
            return bool(node.args[1]) and bool(node.args[2])
        if "scaled_dot_product_attention" in node.target.name():
            given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            return bool(given)
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return False


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that the operator writes into, including a batch norm's statistics."""
    if not isinstance(node.target, OpOverload):
        return []
    name = node.target.name()
    if name in ("aten::batch_norm", "aten::instance_norm"):
        using = bool(node.args[5])
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)] if using else []
    arguments = node.target._schema.arguments
    found = []
    for index, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += [a for a in pytree.tree_leaves(given) if isinstance(a, fx.Node)]
    return found


def origin(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` may be a view of."""
    while node.op == "call_function" and isinstance(node.target, OpOverload):
        arguments = node.target._schema.arguments
        aliased = [
            node.args[i]
            for i, a in enumerate(arguments)
            if a.alias_info is not None and i < len(node.args)
        ]
        names = ("reshape", "contiguous", "to", "flatten")
        if not aliased and str(node.target.name()).partition("::")[2] in names:
            aliased = [node.args[0]]
        if not aliased or not isinstance(aliased[0], fx.Node):
            break
        node = aliased[0]
    return node


def _recomputed(nodes: Sequence[fx.Node], tensors: Mapping[str, torch.Tensor]) -> set[fx.Node]:
    """Return the nodes that read no parameter or written buffer, draw nothing and write nothing."""
    touched = {origin(w) for node in nodes for w in written(node)}
    names = {str(n.target) for n in touched if n.op == "get_attr"}
    found: set[fx.Node] = set()
    for node in nodes:
        if is_random(node) or written(node) or origin(node) in touched:
            continue
        if all(_is_fixed(read, names, tensors) or read in found for read in node.all_input_nodes):
            found.add(node)
    return found


def _is_fixed(node: fx.Node, written_names: set[str], tensors: Mapping[str, torch.Tensor]) -> bool:
    if node.op == "get_attr":
        name = str(node.target)
        return name not in written_names and not isinstance(tensors[name], nn.Parameter)
    return node.op == "placeholder"


def submodule_of(node: fx.Node) -> str:
    """Return the path of the innermost submodule the operator ran in; "" for the module itself."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def value_of(node: fx.Node) -> Any:
    """Return the fake tensor, or tuple of fake tensors, of the node's value."""
    return node.meta.get("val")
