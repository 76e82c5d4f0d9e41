"""Operators without a converter: PyTorch decomposes them into operators that have one."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tvmbridge.core.torch_private import OpOverload, get_decompositions, pytree
from tvmbridge.relay.recurrent import RECURRENT

aten = torch.ops.aten

_TABLE: Final[dict[Any, Any]] = get_decompositions(
    [
        aten._fused_rms_norm.default,
        aten._native_batch_norm_legit.no_stats,
        aten._prelu_kernel.default,
        aten.baddbmm.default,
        aten.gelu.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.index_copy.default,
        aten.linalg_vector_norm.default,
        aten.logsumexp.default,
        aten.roll.default,
        aten.rsub.Scalar,
        aten.rsub.Tensor,
        aten.select_scatter.default,
        aten.silu.default,
        aten.tril.default,
        aten.triu.default,
    ]
)


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    # Not by the operator: its kernel adds epsilon in place, which a graph cannot express.
    return _TABLE[aten._fused_rms_norm.default](x, shape, weight, eps)[0]


def _trilinear(*args: Any) -> Any:
    """Return sums of products of three tensors, which get dimensions of size 1 before."""
    product: Any = 1
    for x, dims in zip(args[:3], args[3:6], strict=True):
        for dim in dims:
            x = x.unsqueeze(dim)
        product = product * x
    return product.sum(args[6])


# Operators whose kernel calls others before the table of decompositions is asked.
_COMPOSITE: Final = {
    aten.prelu.default: aten.prelu.default,
    aten.rms_norm.default: _rms_norm,
    aten._trilinear.default: _trilinear,
    **RECURRENT,
}


def is_decomposed(target: OpOverload) -> bool:
    """Whether PyTorch can write an operator as others that have converters."""
    return target in _COMPOSITE or target in _TABLE


def decomposition(node: fx.Node) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the graph of a node's operator, and the nodes whose tensors the graph takes."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    function: Any = _COMPOSITE.get(node.target, node.target)
    read = {user.args[1] for user in node.users if user.target is operator.getitem}

    def run(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        results = function(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            return results
        return tuple(result if i in read else None for i, result in enumerate(results))

    # Fake tensors of a captured graph do not mix with the constants of a decomposition.
    tensors = [torch.empty_like(n.meta["val"], device="cpu") for n in operands]
    with torch.no_grad():
        traced = make_fx(run, _TABLE, tracing_mode="fake")(*tensors)
    assert isinstance(traced, fx.GraphModule)
    traced.graph.eliminate_dead_code()
    return traced.graph, operands
