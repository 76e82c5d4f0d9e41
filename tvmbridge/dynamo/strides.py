"""Compare the strides that TorchDynamo assumed in a capture with the strides of PyTorch's kernels.

During a capture, ``stride()`` and ``is_contiguous()`` answer for fake tensors, and Dynamo captures
the branch that the answer leads to. If a kernel returns other strides than its fake kernel, eager
PyTorch may take another branch. The graph alone does not show this.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from types import CodeType

import torch
from torch import fx

from tvmbridge.core.torch_private import FakeTensor, pytree, traced_code
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels
from tvmbridge.graph_capture.trace.pools import POOLS, laid_as_in_eager

_ASKING = frozenset({"dim_order", "is_contiguous", "stride", "suggest_memory_format"})


def node_with_other_strides(graph_module: fx.GraphModule) -> str | None:
    """Return the name of the first node whose strides differ between Dynamo and PyTorch's kernels.

    Return None if there is none, or if the captured code does not read strides.
    """
    if not any(map(_asks, traced_code())):
        return None
    return _with_other_strides(graph_module)


def _asks(code: CodeType) -> bool:
    """Whether the code calls a method that depends on strides, such as ``is_contiguous()``.

    A mere read of an attribute ``stride``, as layers have, does not count.
    """
    if _ASKING.isdisjoint(code.co_names):
        return False
    return any(
        i.argval in _ASKING and (i.opname == "LOAD_METHOD" or "NULL|self" in i.argrepr)
        for i in dis.get_instructions(code)
    )


def _with_other_strides(graph_module: fx.GraphModule) -> str | None:
    """Return the name of the first node to which PyTorch's kernels give other strides, or None."""
    walk = _Strides(graph_module, garbage_collect_values=False)
    fakes = [n.meta.get("example_value") for n in graph_module.graph.find_nodes(op="placeholder")]
    modes = [f.fake_mode for f in pytree.tree_leaves(fakes) if isinstance(f, FakeTensor)]
    if not modes:
        return None
    with modes[0], strides_of_kernels(), torch.no_grad():
        walk.run(*map(_anew, fakes))
    return walk.found


class _Strides(fx.Interpreter):
    """Run a graph on fake tensors that have the strides of PyTorch's kernels.

    - ``found``: the name of the first node whose strides differ from those that Dynamo recorded.
    """

    found: str | None = None

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        value = node.meta.get("example_value")
        if node.target in POOLS:
            result = laid_as_in_eager(result, getattr(value, "requires_grad", False))
        recorded = _strides(pytree.tree_leaves(value))
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
    """Return a new fake tensor like ``value``, so that the graph may write into it."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
