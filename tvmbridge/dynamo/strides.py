"""Compare the strides that TorchDynamo assumed in a capture with the strides of PyTorch's kernels.

During a capture, ``stride()`` and ``is_contiguous()`` answer for fake tensors, and Dynamo captures
the branch that the answer leads to. If a kernel returns other strides than its fake kernel, eager
PyTorch may take another branch. The graph alone does not show this.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any

import torch
from torch import fx

from tvmbridge.core.symbolic_numbers import hint_of
from tvmbridge.core.torch_private import (
    FakeTensor,
    FakeTensorMode,
    pytree,
    symbolic_shapes,
    traced_code,
)
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels, unanswered
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
    """Return the name of the first node to which PyTorch's kernels give other strides, or None.

    The graph runs at the sizes of the call that Dynamo captured, also if its sizes are symbols.
    """
    walk = _Strides(graph_module, garbage_collect_values=False)
    given = [n.meta.get("example_value") for n in graph_module.graph.find_nodes(op="placeholder")]
    if not any(isinstance(value, FakeTensor) for value in pytree.tree_leaves(given)):
        return None
    symbols = symbolic_shapes().ShapeEnv()  # of results whose shapes depend on values
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols, static_shapes=True)
    with mode, strides_of_kernels(), torch.no_grad():
        walk.run(*(pytree.tree_map(_at_sizes, value) for value in given))
        return walk.found or next(iter(unanswered()), None)


class _Strides(fx.Interpreter):
    """Run a graph on fake tensors that have the strides of PyTorch's kernels.

    - ``found``: the name of the first node whose strides differ from those that Dynamo recorded.
    """

    found: str | None = None

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        value = node.meta.get("example_value")
        if value is None:
            return result
        if node.target in POOLS:
            result = laid_as_in_eager(result, getattr(value, "requires_grad", False))
        recorded = [_strides(leaf) for leaf in pytree.tree_leaves(value)]
        found = [_strides(leaf) for leaf in pytree.tree_leaves(result)]
        if self.found is None and None not in (*recorded, *found) and recorded != found:
            self.found = node.name
        return result


def _strides(leaf: object) -> object:
    """Return the strides of a tensor as numbers; None if one is unknown; () for other values."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return ()
    sizes = [hint_of(n) for n in (*leaf.shape, *leaf.stride())]
    return None if None in sizes else tuple(sizes[leaf.dim() :])


def _at_sizes(value: Any) -> Any:
    """Return a new fake tensor like ``value``, so that the graph may write into it."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return hint_of(value)
    shape, strides = map(hint_of, value.shape), map(hint_of, value.stride())
    device, dtype = value.device, value.dtype
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
