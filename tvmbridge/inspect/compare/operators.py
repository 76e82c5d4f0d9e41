"""Relax operators as PyTorch functions: an interpretation independent of compiled code.

``OPERATORS[name](call, *operands)`` computes the result of a call, a tensor or a list of tensors.
Operands are tensors, lists of tensors for tuples, and lists of ints for shapes and tuples of
numbers. An operator that is missing here is compiled alone by TVM.

TVM's own interpreter on PyTorch (``RelaxToPyFuncConverter``) is not used: it computes several
operators differently (GELU by tanh, for example), and returns zeros for unknown operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from tvm import relax

from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, shape_of

Tensor = torch.Tensor
Meaning = Callable[..., Any]


def _plain(function: Callable[..., Any]) -> Meaning:
    """Wrap a PyTorch function for an operator without attributes."""
    return lambda call, *operands: function(*operands)


def _reduction(function: Callable[..., Tensor]) -> Meaning:
    def evaluate(call: relax.Call, x: Tensor) -> Tensor:
        given = call.attrs.axis
        axes = list(range(x.dim())) if given is None else [int(a) % max(x.dim(), 1) for a in given]
        return function(x, axes, keepdim=bool(call.attrs.keepdims)) if axes else x.clone()

    return evaluate


def _prod(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keepdim)
    return x


def _to_type(call: relax.Call, *operands: Any) -> Tensor:
    """Broadcast and cast the last operand to the shape and dtype of the call."""
    value: Tensor = operands[-1].to(from_relax_dtype(dtype_of(call)))
    return value.expand(shape_of(call) or ()).clone()


def _reshape(call: relax.Call, x: Tensor, *_: Any) -> Tensor:
    return x.reshape(shape_of(call) or ())


def _permute_dims(call: relax.Call, x: Tensor) -> Tensor:
    axes = call.attrs.axes
    return x.permute(list(range(x.dim()))[::-1] if axes is None else [int(a) for a in axes])


def _strided_slice(
    call: relax.Call, x: Tensor, axes: Any, begins: Any, ends: Any, *steps: Any
) -> Tensor:
    index = [slice(None)] * x.dim()
    strides = steps[0] if steps else [1] * len(axes)
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        index[axis] = slice(begin, end, stride)
    return x[tuple(index)]


def _split(call: relax.Call, x: Tensor) -> list[Tensor]:
    parts, axis = call.attrs.indices_or_sections, int(call.attrs.axis)
    if hasattr(parts, "value"):
        return list(torch.split(x, -(-x.shape[axis] // int(parts.value)), axis))
    return list(torch.tensor_split(x, [int(p.value) for p in parts], axis))


def _take(call: relax.Call, x: Tensor, indices: Tensor) -> Tensor:
    if call.attrs.axis is None:
        return torch.take(x, indices)
    rows = x.index_select(int(call.attrs.axis), indices.reshape(-1))
    return rows.reshape(shape_of(call) or ())


def _take_backward(call: relax.Call, cotangent: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    axis = int(call.attrs.axis) % x.dim()
    flat = cotangent.reshape(*x.shape[:axis], indices.numel(), *x.shape[axis + 1 :])
    return torch.zeros_like(x).index_add(axis, indices.reshape(-1), flat)


def _matmul(call: relax.Call, x: Tensor, y: Tensor) -> Tensor:
    dtype = from_relax_dtype(dtype_of(call))
    return torch.matmul(x.to(dtype), y.to(dtype))


def _norm(function: Callable[..., Tensor]) -> Meaning:
    def evaluate(call: relax.Call, x: Tensor, *weights: Tensor) -> Tensor:
        axes = [int(a) % x.dim() for a in call.attrs.axes]
        if axes != list(range(x.dim() - len(axes), x.dim())):
            raise NotImplementedError("a norm over other than the last axes")
        if not all(getattr(call.attrs, name, True) for name in ("scale", "center")):
            raise NotImplementedError("a norm that reads not all of its weights")
        return function(x, x.shape[-len(axes) :], *weights, eps=float(call.attrs.epsilon))

    return evaluate


# Operators of the same name and meaning in PyTorch, without attributes.
_SAME_NAME = """
add subtract multiply divide negative abs exp log sqrt rsqrt sin cos tan tanh sigmoid erf
floor ceil trunc round sign square log2 log10 isnan isinf isfinite maximum minimum less less_equal
greater greater_equal not_equal logical_and logical_or logical_not logical_xor bitwise_and
bitwise_or bitwise_not bitwise_xor where zeros_like ones_like asin acos atan sinh cosh asinh acosh
atanh triu tril
"""

OPERATORS: dict[str, Meaning] = {
    **{f"relax.{name}": _plain(getattr(torch, name)) for name in _SAME_NAME.split()},
    "relax.equal": _plain(torch.eq),
    "relax.power": _plain(torch.pow),
    "relax.clip": _plain(torch.clamp),
    "relax.nn.relu": _plain(torch.relu),
    "relax.nn.silu": _plain(functional.silu),
    "relax.nn.gelu": _plain(functional.gelu),
    "relax.nn.gelu_tanh": lambda call, x: functional.gelu(x, approximate="tanh"),
    "relax.nn.softmax": lambda call, x: torch.softmax(x, int(call.attrs.axis)),
    "relax.nn.log_softmax": lambda call, x: torch.log_softmax(x, int(call.attrs.axis)),
    "relax.nn.layer_norm": _norm(functional.layer_norm),
    "relax.nn.rms_norm": _norm(functional.rms_norm),
    "relax.grad.no_grad": lambda call, x: x,
    "relax.grad.take_backward": _take_backward,
    "relax.sum": _reduction(torch.sum),
    "relax.mean": _reduction(torch.mean),
    "relax.prod": _reduction(_prod),
    "relax.variance": _reduction(lambda x, a, keepdim: torch.var(x, a, False, keepdim)),
    "relax.max": _reduction(torch.amax),
    "relax.min": _reduction(torch.amin),
    "relax.matmul": _matmul,
    "relax.reshape": _reshape,
    "relax.expand_dims": _reshape,
    "relax.squeeze": _reshape,
    "relax.permute_dims": _permute_dims,
    "relax.concat": lambda call, xs: torch.cat(xs, int(call.attrs.axis or 0)),
    "relax.stack": lambda call, xs: torch.stack(xs, int(call.attrs.axis or 0)),
    "relax.split": _split,
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.tile": lambda call, x: torch.tile(x, [int(r) for r in call.attrs.repeats]),
    "relax.flip": lambda call, x: torch.flip(x, [int(call.attrs.axis)]),
    "relax.collapse_sum_to": lambda call, x, *_: x.sum_to_size(shape_of(call) or ()),
    "relax.collapse_sum_like": lambda call, x, *_: x.sum_to_size(shape_of(call) or ()),
    "relax.zeros": lambda call, *_: _to_type(call, torch.zeros(())),
    "relax.ones": lambda call, *_: _to_type(call, torch.ones(())),
    "relax.astype": _to_type,
    "relax.full": _to_type,
    "relax.full_like": _to_type,
    "relax.broadcast_to": lambda call, x, _: _to_type(call, x),
}
