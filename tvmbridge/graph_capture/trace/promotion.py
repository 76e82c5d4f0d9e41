"""Promote dtypes as PyTorch's real kernels do.

For operands of mixed dtypes, some fake kernels and decompositions promote differently from the real
kernel: ``huber_loss`` of float32 and float64, for example. So the real kernel runs on zeros, and
the dtypes of its results are used.
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
    """Compute ``huber_loss`` in the promoted dtype, each element rounded to the input's dtype."""
    wide = torch.promote_types(input.dtype, target.dtype)
    each = nn.functional.huber_loss(input.to(wide), target.to(wide), "none", delta)
    rounded = each.to(input.dtype)
    return rounded if reduction == "none" else getattr(rounded, reduction)()


def _soft_margin_loss(
    input: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """Compute ``soft_margin_loss`` with the target in the input's dtype, as the kernel does."""
    return nn.functional.soft_margin_loss(input, target.to(input.dtype), *rest, **named)


def _normal(mean: torch.Tensor, std: torch.Tensor, **named: Any) -> torch.Tensor:
    """Draw ``torch.normal`` in the dtype of the mean, as the kernel does."""
    return torch.normal(mean, std.to(mean.dtype), **named)


def _cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """Compute ``binary_cross_entropy_with_logits`` with the result in the kernel's dtype.

    In PyTorch 2.11 the result has the target's dtype.
    """
    loss = nn.functional.binary_cross_entropy_with_logits
    op = torch.ops.aten.binary_cross_entropy_with_logits.default
    wide = torch.promote_types(input.dtype, target.dtype)
    (dtype,) = kernel_dtypes(op, (input, target), {}) or [None]
    if dtype in (None, wide):
        return loss(input, target, *rest, **named)
    return loss(input.to(wide), target.to(wide), *rest, **named).to(dtype)


# Their fake kernels promote dtypes, but the real kernels keep the dtype of one operand.
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
    """Return the dtypes of the results of PyTorch's kernel for arguments of mixed dtypes.

    Returns:
        A dtype for each result. None if the operands have one dtype, so that nothing is promoted,
        or if the kernel cannot run.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if len({t.dtype for t in tensors} - {torch.bool}) < 2:
        return None
    return dtypes_of_zeros(op, args, kwargs)


def dtypes_of_zeros(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device: str = "cpu"
) -> list[torch.dtype | None] | None:
    """Run PyTorch's kernel on zeros of the given dtypes and shapes, and return its result dtypes.

    Args:
        device: the device of the zeros, on which autocast depends.

    Returns:
        A dtype for each result that is a tensor; None if the kernel cannot run.
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
    # After an assertion has failed on a GPU, the process cannot use the GPU any more.
    checks = "assert" in op._schema.name
    return known and not random and not checks and not op._schema.is_mutable


def _zeros(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return zeros of the tensor's shape and dtype; an expanded tensor's take no more memory."""
    shape = list(tensor.shape)
    # Some kernels ignore the strides of indices.
    if tensor.layout is torch.strided and tensor.dtype not in (torch.int32, torch.int64):
        shape = [
            min(extent, 1) if stride == 0 else extent
            for extent, stride in zip(shape, tensor.stride(), strict=True)
        ]
    return torch.zeros(shape, dtype=tensor.dtype, device=device).expand(tensor.shape)


def promoting_as_kernels(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Return ``table`` with decompositions that cast their results to the kernels' dtypes."""
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
    # During export, ``to`` records an assertion, which would keep an unused result alive.
    if dtype is None or not isinstance(result, torch.Tensor) or result.dtype is dtype:
        return result
    return result.to(dtype)
