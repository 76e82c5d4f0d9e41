"""Writes of a program into memory that no other value shares."""

from __future__ import annotations

import torch
from torch import fx

from tvmbridge.core.torch_private import OpOverload, pytree, storage_key
from tvmbridge.graph_capture.trace.operator_traces import NotByOperatorError

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
