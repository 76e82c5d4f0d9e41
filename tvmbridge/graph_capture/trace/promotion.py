"""Type promotion as PyTorch's kernels do it.

For operands of mixed dtypes some fake kernels and decompositions promote otherwise than the real
kernel (``huber_loss`` of float32 and float64, say). So the real kernel is run on zeros, and its
dtypes count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.core.torch_private import OpOverload, disable_current_modes, pytree
from tvmbridge.graph_capture.trace.autocast_lists import cast_to_float32
from tvmbridge.graph_capture.trace.function_table import Call, replaces

Decomposition = Callable[..., Any]


def _huber_loss(
    input: torch.Tensor, target: torch.Tensor, reduction: str = "mean", delta: float = 1.0
) -> torch.Tensor:
    """Each element is computed in the promoted dtype and rounded to the dtype of the input."""
    wide = torch.promote_types(input.dtype, target.dtype)
    each = nn.functional.huber_loss(input.to(wide), target.to(wide), "none", delta)
    rounded = each.to(input.dtype)
    return rounded if reduction == "none" else getattr(rounded, reduction)()


def _soft_margin_loss(
    input: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """The kernel writes the negative target into a tensor of the input's dtype."""
    return nn.functional.soft_margin_loss(input, target.to(input.dtype), *rest, **named)


def _normal(mean: torch.Tensor, std: torch.Tensor, **named: Any) -> torch.Tensor:
    """The kernel draws in the dtype of the mean, and scales in place."""
    return torch.normal(mean, std.to(mean.dtype), **named)


def _cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """In PyTorch 2.11 the kernel writes into a tensor of the target's dtype."""
    loss = nn.functional.binary_cross_entropy_with_logits
    op = torch.ops.aten.binary_cross_entropy_with_logits.default
    wide = torch.promote_types(input.dtype, target.dtype)
    (dtype,) = kernel_dtypes(op, (input, target), {}) or [None]
    if dtype in (None, wide):
        return loss(input, target, *rest, **named)
    return loss(input.to(wide), target.to(wide), *rest, **named).to(dtype)


# Their fake kernels promote where the kernels keep the dtype of the first operand.
_KEPT_DTYPE: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.binary_cross_entropy_with_logits: _cross_entropy,
    nn.functional.huber_loss: _huber_loss,
    nn.functional.soft_margin_loss: _soft_margin_loss,
    torch.normal: _normal,
}
_OPERANDS = ("input", "target", "mean", "std")


@replaces(*_KEPT_DTYPE)
def _promoted(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("weight") is None and len(args) < 5:
        operands = [*args[:2], *(kwargs[name] for name in _OPERANDS if name in kwargs)]
        if _differ_in_dtype(operands):
            kwargs.pop("weight", None)
            args, kwargs = cast_to_float32(call.function.__name__, args, kwargs)
            return _KEPT_DTYPE[call.function](*args, **kwargs)
    return call(*args, **kwargs)


def _differ_in_dtype(operands: Sequence[Any]) -> bool:
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    dtypes = [t.dtype for t in tensors]
    if len(dtypes) != 2 or not dtypes[0].is_floating_point:
        return False
    return dtypes[1] not in (dtypes[0], torch.bool)


def kernel_dtypes(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.dtype | None] | None:
    """The dtypes of the results of PyTorch's kernel for arguments of these dtypes and shapes.

    Args:
        op: the operator.
        args: its arguments; of the tensors among them only metadata is read.
        kwargs: its keyword arguments.

    Returns:
        One for each result; None where the operands are all of one dtype (so that nothing is
        promoted) or where the kernel cannot be asked.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if len({t.dtype for t in tensors} - {torch.bool}) < 2:
        return None
    return dtypes_of_zeros(op, args, kwargs)


def dtypes_of_zeros(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device: str = "cpu"
) -> list[torch.dtype | None] | None:
    """The dtypes that PyTorch's kernel gives its results for zeros of these dtypes and shapes.

    ``device`` is where the zeros are; autocast looks at it. None where the kernel cannot be asked.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if not _may_be_tried(op, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
        return None
    with disable_current_modes(), torch.no_grad():
        try:
            zeros = [_zeros(v, device) if isinstance(v, torch.Tensor) else v for v in leaves]
            positional, named = pytree.tree_unflatten(zeros, spec)
            results = op(*positional, **named)
        except Exception:
            return None
    several = isinstance(results, tuple | list)
    return [
        result.dtype if isinstance(result, torch.Tensor) else None
        for result in (results if several else [results])
    ]


def _may_be_tried(op: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
    random = torch.Tag.nondeterministic_seeded in op.tags
    known = all(isinstance(extent, int) for t in tensors for extent in t.shape)
    # A check that fails on a GPU ends the use of it for the whole process.
    checks = "assert" in op._schema.name
    return known and not random and not checks and not op._schema.is_mutable


def _zeros(tensor: torch.Tensor, device: str) -> torch.Tensor:
    # Dense: some kernels read indices as if they were, whatever their strides say.
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def promoting_as_kernels(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """``table`` with decompositions whose results have the dtypes that the kernels give them."""
    return {op: _corrected(op, function) for op, function in table.items()}


def _corrected(op: Any, function: Decomposition) -> Decomposition:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        if not isinstance(results, torch.Tensor | tuple | list):
            return results  # a size, or NotImplemented
        dtypes = kernel_dtypes(op, args, kwargs)
        if dtypes is None:
            return results
        if isinstance(results, torch.Tensor):
            return _as(results, dtypes[0])
        return tuple(map(_as, results, dtypes))

    return decompose


def _as(result: Any, dtype: torch.dtype | None) -> Any:
    return result if dtype is None or not isinstance(result, torch.Tensor) else result.to(dtype)
