"""Replace functions whose C++ code in PyTorch reads sizes as plain integers.

Such code makes a constant of a symbolic size: the trace would be valid for the sample's size alone.
The replacements consist of operators that take symbolic sizes, and replace calls with tensors of
such sizes alone. A replacement returns None for arguments that it is not for, most of which are
errors. PyTorch's function is then called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.trace.function_table import Call, replaces


def _take_along_dim(
    input: torch.Tensor, indices: torch.Tensor, dim: int | None = None
) -> torch.Tensor | None:
    if indices.dtype != torch.int64:
        return None
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.dim() != indices.dim() or not -input.dim() <= dim < input.dim():
        return None
    dim = dim % input.dim()
    ones = [[1 if i == dim else n for i, n in enumerate(x.shape)] for x in (input, indices)]
    shape = torch.broadcast_shapes(*map(tuple, ones))
    expanded = [
        x.expand([x.shape[dim] if i == dim else n for i, n in enumerate(shape)])
        for x in (input, indices)
    ]
    # Unlike ``gather``, the function takes any index, and begins again after the last element.
    return expanded[0].gather(dim, expanded[1].remainder(input.shape[dim]))


def _kron(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    rank = max(input.dim(), other.dim())
    left, right = ([1] * (rank - x.dim()) + list(x.shape) for x in (input, other))
    rows = input.reshape([n for size in left for n in (size, 1)])
    columns = other.reshape([n for size in right for n in (1, size)])
    return (rows * columns).reshape([a * b for a, b in zip(left, right, strict=True)])


def _block_diag(*tensors: torch.Tensor) -> torch.Tensor | None:
    # The dtype of a tensor without dimensions counts less than those of others.
    if not tensors or {t.dim() for t in tensors} - {1, 2}:
        return None
    blocks = [torch.atleast_2d(t) for t in tensors]
    dtype = functools.reduce(torch.promote_types, [b.dtype for b in blocks])
    widths = [b.shape[1] for b in blocks]
    rows = [
        functional.pad(b.to(dtype), (sum(widths[:i]), sum(widths[i + 1 :])))
        for i, b in enumerate(blocks)
    ]
    return torch.cat(rows)


def _multi_dot(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the product in an order that no size decides: from the vector, if there is one."""
    inner = {t.dim() for t in tensors[1:-1]}
    if len(tensors) < 2 or inner - {2} or {tensors[0].dim(), tensors[-1].dim()} - {1, 2}:
        return None
    if len({t.dtype for t in tensors}) > 1:
        return None
    if tensors[-1].dim() == 1:
        return functools.reduce(lambda product, matrix: matrix @ product, reversed(tensors))
    return functools.reduce(torch.matmul, tensors)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    torch.kron: _kron,
    torch.Tensor.kron: _kron,
    torch.block_diag: _block_diag,
    torch.linalg.multi_dot: _multi_dot,
}


@replaces(*_FUNCTIONS)
def _of_any_size(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    symbolic = any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape)
    if "out" in kwargs or not (symbolic or sizes_vary()):
        return call(*args, **kwargs)
    result = _FUNCTIONS[call.function](*args, **kwargs)
    return call(*args, **kwargs) if result is None else result
