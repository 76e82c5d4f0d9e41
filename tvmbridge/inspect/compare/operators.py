"""What Relax operators mean, in PyTorch: an interpretation that is independent of compiled code.

``OPERATORS[name](call, operands)`` returns the tensor (or the list of tensors) that a call makes of
its operands: tensors, lists of tensors for tuples, lists of ints for shapes and tuples of numbers.
An operator that is missing here is evaluated by TVM, one operator at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from tvm import relax

from tvmbridge.kernels.convolution import CONVOLUTIONS, Convolution
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, shape_of

Meaning = Callable[[relax.Call, list[Any]], Any]


def _plain(function: Callable[..., Any]) -> Meaning:
    """An operator without attributes."""
    return lambda call, operands: function(*operands)


def _axes(call: relax.Call, name: str = "axis") -> list[int] | None:
    """An attribute that lists axes, made positive; None: all of them."""
    value = getattr(call.attrs, name)
    if value is None:
        return None
    rank = len(shape_of(call.args[0]) or ())
    listed = [value] if isinstance(value, int) else value
    return [int(a) % max(rank, 1) for a in listed]


def _reduction(function: Callable[..., torch.Tensor]) -> Meaning:
    def evaluate(call: relax.Call, operands: list[Any]) -> torch.Tensor:
        (x,) = operands
        axes = _axes(call)
        listed = list(range(x.dim())) if axes is None else axes
        if not listed:
            return x.clone()
        return function(x, listed, keepdim=bool(call.attrs.keepdims))

    return evaluate


def _variance(x: torch.Tensor, axes: list[int], keepdim: bool) -> torch.Tensor:
    return torch.var(x, axes, correction=0, keepdim=keepdim)


def _prod(x: torch.Tensor, axes: list[int], keepdim: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keepdim)
    return x


def _to_type(call: relax.Call, value: torch.Tensor) -> torch.Tensor:
    """``value`` broadcast and cast to the type of the call."""
    shape = shape_of(call)
    assert shape is not None
    return value.to(from_relax_dtype(dtype_of(call))).expand(shape).clone()


def _reshape(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    shape = shape_of(call)
    assert shape is not None
    value: torch.Tensor = operands[0].reshape(shape)
    return value


def _permute_dims(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    (x,) = operands
    axes = _axes(call, "axes")
    value: torch.Tensor = x.permute(list(range(x.dim()))[::-1] if axes is None else axes)
    return value


def _strided_slice(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    x, axes, begins, ends, *steps = operands
    strides = steps[0] if steps else [1] * len(axes)
    index = [slice(None)] * x.dim()
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        index[axis] = slice(begin, end, stride)
    value: torch.Tensor = x[tuple(index)]
    return value


def _split(call: relax.Call, operands: list[Any]) -> list[torch.Tensor]:
    (x,) = operands
    parts, axis = call.attrs.indices_or_sections, int(call.attrs.axis)
    if hasattr(parts, "value"):
        extent = x.shape[axis]
        return list(torch.split(x, -(-extent // int(parts.value)), axis))
    return list(torch.tensor_split(x, [int(p.value) for p in parts], axis))


def _take(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    x, indices = operands
    if call.attrs.axis is None:
        return torch.take(x, indices)
    axis = int(call.attrs.axis) % x.dim()
    rows = x.index_select(axis, indices.reshape(-1))
    return rows.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _take_backward(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    cotangent, x, indices = operands
    axis = int(call.attrs.axis) % x.dim()
    flat = cotangent.reshape(*x.shape[:axis], indices.numel(), *x.shape[axis + 1 :])
    return torch.zeros_like(x).index_add(axis, indices.reshape(-1), flat)


def _matmul(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    dtype = from_relax_dtype(dtype_of(call))
    return torch.matmul(operands[0].to(dtype), operands[1].to(dtype))


def _normalized(call: relax.Call, x: torch.Tensor) -> list[int]:
    """The extents that a norm is taken over: of the last axes only."""
    axes = _axes(call, "axes") or []
    if axes != list(range(x.dim() - len(axes), x.dim())):
        raise NotImplementedError("a norm over other than the last axes")
    return list(x.shape[x.dim() - len(axes) :])


def _layer_norm(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    x, gamma, beta = operands
    attrs = call.attrs
    return functional.layer_norm(
        x,
        _normalized(call, x),
        gamma if attrs.scale else None,
        beta if attrs.center else None,
        float(attrs.epsilon),
    )


def _rms_norm(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    x, gamma = operands
    return functional.rms_norm(x, _normalized(call, x), gamma, float(call.attrs.epsilon))


def _convolution(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    convolution = Convolution.of(call)
    if convolution is None:
        raise NotImplementedError("a convolution that PyTorch has no kernel for")
    x, weight = operands
    return torch.convolution(
        x,
        weight,
        None,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.transposed,
        convolution.output_padding,
        convolution.groups,
    )


def _collapse(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    shape = shape_of(call)
    assert shape is not None
    value: torch.Tensor = operands[0].sum_to_size(shape)
    return value


def _clip(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    x, low, high = operands
    return torch.clamp(x, low, high)


def _extreme(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, axes, keepdim: function(x, dim=axes, keepdim=keepdim)


# Operators of the same name and meaning in PyTorch, without attributes.
_SAME_NAME = """
add subtract multiply divide negative abs exp log sqrt rsqrt sin cos tan tanh sigmoid erf
floor ceil trunc round sign square log2 log10 isnan isinf isfinite maximum minimum less less_equal
greater greater_equal not_equal logical_and logical_or logical_not logical_xor bitwise_and
bitwise_or bitwise_not bitwise_xor where zeros_like ones_like asin acos atan sinh cosh asinh acosh
atanh
"""

OPERATORS: dict[str, Meaning] = {
    **{f"relax.{name}": _plain(getattr(torch, name)) for name in _SAME_NAME.split()},
    "relax.equal": _plain(torch.eq),
    "relax.power": _plain(torch.pow),
    "relax.nn.relu": _plain(torch.relu),
    "relax.nn.silu": _plain(functional.silu),
    "relax.nn.gelu": _plain(functional.gelu),
    "relax.nn.gelu_tanh": lambda call, v: functional.gelu(v[0], approximate="tanh"),
    "relax.nn.softmax": lambda call, v: torch.softmax(v[0], int(call.attrs.axis)),
    "relax.nn.log_softmax": lambda call, v: torch.log_softmax(v[0], int(call.attrs.axis)),
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.rms_norm": _rms_norm,
    "relax.grad.no_grad": lambda call, v: v[0],
    "relax.grad.take_backward": _take_backward,
    "relax.sum": _reduction(torch.sum),
    "relax.mean": _reduction(torch.mean),
    "relax.prod": _reduction(_prod),
    "relax.variance": _reduction(_variance),
    "relax.max": _reduction(_extreme(torch.amax)),
    "relax.min": _reduction(_extreme(torch.amin)),
    "relax.matmul": _matmul,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "relax.clip": _clip,
    "relax.astype": lambda call, v: _to_type(call, v[0]),
    "relax.broadcast_to": lambda call, v: _to_type(call, v[0]),
    "relax.full": lambda call, v: _to_type(call, v[-1]),
    "relax.full_like": lambda call, v: _to_type(call, v[-1]),
    "relax.zeros": lambda call, v: _to_type(call, torch.zeros(())),
    "relax.ones": lambda call, v: _to_type(call, torch.ones(())),
    "relax.reshape": _reshape,
    "relax.expand_dims": _reshape,
    "relax.squeeze": _reshape,
    "relax.permute_dims": _permute_dims,
    "relax.concat": lambda call, v: torch.cat(v[0], int(call.attrs.axis or 0)),
    "relax.stack": lambda call, v: torch.stack(v[0], int(call.attrs.axis or 0)),
    "relax.split": _split,
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.tile": lambda call, v: torch.tile(v[0], [int(r) for r in call.attrs.repeats]),
    "relax.flip": lambda call, v: torch.flip(v[0], [int(call.attrs.axis)]),
    "relax.triu": lambda call, v: torch.triu(v[0], v[1]),
    "relax.tril": lambda call, v: torch.tril(v[0], v[1]),
    "relax.collapse_sum_to": _collapse,
    "relax.collapse_sum_like": _collapse,
}
