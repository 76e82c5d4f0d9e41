"""Strides that TorchDynamo told forward of, beside those of PyTorch's kernels.

Dynamo answers ``stride()`` and ``is_contiguous()`` by the strides of fake tensors while it captures
a function, and keeps the branch that the answer led to. Where a kernel gives other strides than its
fake kernel, that branch is not eager PyTorch's, and no backend can tell from the graph.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from types import CodeType

import torch
from torch import fx

from tvmbridge.core.torch_private import FakeTensor, pytree, traced_code
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels

_ASKING = frozenset({"dim_order", "is_contiguous", "stride", "suggest_memory_format"})


def node_with_other_strides(graph_module: fx.GraphModule) -> str | None:
    """The first node of a graph that has other strides for Dynamo than PyTorch's kernels give.

    None: there is none, or what Dynamo captures asks for no strides.
    """
    if not any(map(_asks, traced_code())):
        return None
    return _with_other_strides(graph_module)


def _asks(code: CodeType) -> bool:
    """Whether a function calls a method that tells strides; a layer has an attribute ``stride``."""
    if _ASKING.isdisjoint(code.co_names):
        return False
    return any(
        i.argval in _ASKING and (i.opname == "LOAD_METHOD" or "NULL|self" in i.argrepr)
        for i in dis.get_instructions(code)
    )


def _with_other_strides(graph_module: fx.GraphModule) -> str | None:
    """The first node whose strides are others where kernels are asked."""
    walk = _Strides(graph_module, garbage_collect_values=False)
    fakes = [n.meta.get("example_value") for n in graph_module.graph.find_nodes(op="placeholder")]
    modes = [f.fake_mode for f in pytree.tree_leaves(fakes) if isinstance(f, FakeTensor)]
    if not modes:
        return None
    with modes[0], strides_of_kernels(), torch.no_grad():
        walk.run(*map(_anew, fakes))
    return walk.found


class _Strides(fx.Interpreter):
    """Runs a graph on fake tensors; ``found`` is the first node with other strides than recorded.

    A node behind it is run on what it really gets.
    """

    found: str | None = None

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        recorded = _strides(pytree.tree_leaves(node.meta.get("example_value")))
        if self.found is None and recorded and recorded != _strides(pytree.tree_leaves(result)):
            self.found = node.name
        return result


def _strides(leaves: Iterable[object]) -> list[tuple[int, ...]]:
    return [
        t.stride()
        for t in leaves
        if isinstance(t, torch.Tensor)
        and t.layout is torch.strided
        and all(type(n) is int for n in t.shape)
    ]


def _anew(value: object) -> object:
    """A fake tensor like ``value``, which a graph may write."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
