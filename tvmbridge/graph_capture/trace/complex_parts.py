"""Decompose operators on complex tensors into operators on their real and imaginary parts.

TVM has no complex numbers. In compiled code a complex tensor is a real one of pairs, for which
``view_as_real`` and ``view_as_complex`` do nothing. PyTorch's kernels run the other operators,
except in code that runs without PyTorch: the decompositions here are for such code. An operator
that has none stays in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.trace.fourier import FOURIER

aten = torch.ops.aten

Parts = tuple[Any, Any]
Function = Callable[..., Any]


def complex_decompositions(table: Mapping[Any, Function]) -> dict[Any, Function]:
    """Return decompositions for complex operands.

    For other operands, the result decomposes as ``table`` does.
    """
    arithmetic = {op: _for_complex(parts, table.get(op)) for op, parts in _ARITHMETIC.items()}
    moves = {op: _for_complex(_by_part(op), table.get(op)) for op in _BY_PART}
    return {**arithmetic, **moves, **_MAKE_COMPLEX, **FOURIER}


def _for_complex(parts: Function, otherwise: Function | None) -> Function:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, complex) or _is_complex(leaf) for leaf in leaves):
            return parts(*args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(*args, **kwargs)

    return decompose


def _parts(value: Any) -> Parts:
    """Return the real and the imaginary part of a tensor or a number."""
    if isinstance(value, torch.Tensor):
        if not value.is_complex():
            return value, 0.0
        real, imaginary = torch.view_as_real(value).unbind(-1)
        return real, imaginary
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0.0)


def _promoted(a: Any, b: Any) -> tuple[Parts, Parts]:
    """Return the parts of both operands in the dtype of the result.

    Integers would wrap in a dtype of their own.
    """
    dtype = torch.result_type(a, b).to_real()

    def converted(part: Any) -> Any:
        return part.to(dtype) if isinstance(part, torch.Tensor) else part

    (re, im), (other_re, other_im) = _parts(a), _parts(b)
    return (converted(re), converted(im)), (converted(other_re), converted(other_im))


def _pair(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def _result(real: Any, imaginary: Any, *operands: Any) -> torch.Tensor:
    """Return a complex tensor of the dtype to which PyTorch promotes ``operands``."""
    dtype = torch.result_type(*operands).to_real()
    real, imaginary = torch.broadcast_tensors(real, _as_tensor(imaginary, real))
    return _pair(real.to(dtype), imaginary.to(dtype))


def _as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full_like(like, value)


def _sum(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if isinstance(alpha, complex):
        return NotImplemented
    (re, im), (other_re, other_im) = _promoted(a, b)
    real, imaginary = re + alpha * other_re, im + alpha * other_im
    if not isinstance(real, torch.Tensor):
        return NotImplemented
    return _result(real, imaginary, a, b)


def _difference(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if isinstance(alpha, complex) else _sum(a, b, alpha=-alpha)


def _product(a: Any, b: Any) -> torch.Tensor:
    (re, im), (other_re, other_im) = _promoted(a, b)
    real, imaginary = re * other_re - im * other_im, re * other_im + im * other_re
    return _result(real, imaginary, a, b)


def _quotient(a: Any, b: Any) -> torch.Tensor:
    (re, im), (c, d) = _promoted(a, b)
    if isinstance(b, complex):
        c, d = torch.full_like(re, c), torch.full_like(re, d)
    elif not _is_complex(b):
        return _result(re / c, im / c, a, b)
    # The larger part of the divisor is divided by, so that its square does not overflow.
    wide = c.abs() >= d.abs()
    zero = (c == 0) & (d == 0)
    large, small = torch.where(wide, c, d), torch.where(wide, d, c)
    ratio = torch.where(zero, torch.zeros_like(c), small / large)
    scale = 1 / (large + small * ratio)
    real = torch.where(wide, re + im * ratio, re * ratio + im) * scale
    imaginary = torch.where(wide, im - re * ratio, im * ratio - re) * scale
    real = torch.where(zero, re / c.abs(), real)
    imaginary = torch.where(zero, im / d.abs(), imaginary)
    return _result(real, imaginary, a, b)


def _matrix_product(op: Any) -> Function:
    def parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (re, im), (other_re, other_im) = _parts(a), _parts(b)
        return _pair(
            op(re, other_re) - op(im, other_im),
            op(re, other_im) + op(im, other_re),
        )

    return parts


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    real, imaginary = _parts(x)
    return _pair(real, -imaginary)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return torch.hypot(*_parts(x))


def _angle(x: torch.Tensor) -> torch.Tensor:
    real, imaginary = _parts(x)
    return torch.atan2(imaginary, real)


def _exponential(x: torch.Tensor) -> torch.Tensor:
    real, imaginary = _parts(x)
    magnitude = torch.exp(real)
    # An infinite magnitude times zero would be NaN.
    sine = torch.where(imaginary == 0, imaginary, magnitude * torch.sin(imaginary))
    return _pair(magnitude * torch.cos(imaginary), sine)


def _power(x: Any, exponent: Any) -> Any:
    return _product(x, x) if exponent == 2 and isinstance(x, torch.Tensor) else NotImplemented


def _is_equal(a: Any, b: Any) -> Any:
    (re, im), (other_re, other_im) = _parts(a), _parts(b)
    return (re == other_re) & (im == other_im)


def _polar(magnitude: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return _pair(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


def _from_parts(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return _pair(*torch.broadcast_tensors(real, imaginary))


def _converted(x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Return a copy; of a complex tensor, a real dtype takes the real part."""
    dtype = x.dtype if dtype is None else dtype
    real, imaginary = _parts(x)
    if dtype == torch.bool:
        return (real != 0) | (imaginary != 0)
    if not dtype.is_complex:
        return real.to(dtype)
    real = real.to(dtype.to_real())
    return _pair(real, _as_tensor(imaginary, real).to(real.dtype))


def _to_copy(x: torch.Tensor, **kwargs: Any) -> Any:
    if x.is_complex() or (kwargs.get("dtype") or x.dtype).is_complex:
        return _converted(x, **kwargs)
    return NotImplemented


def _by_part(op: Any) -> Function:
    """Return a decomposition that applies ``op`` to the real and to the imaginary parts."""

    def parts(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.dtype) for value in kwargs.values()):
            return NotImplemented
        results = [
            op(*pytree.tree_map(part, args), **pytree.tree_map(part, kwargs))
            for part in (_real_part, _imaginary_part)
        ]
        return pytree.tree_map(_pair, *results)

    return parts


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _real_part(value: Any) -> Any:
    return _parts(value)[0] if _is_complex(value) else value


def _imaginary_part(value: Any) -> Any:
    return _parts(value)[1] if _is_complex(value) else value


def _joined(op: Any) -> Function:
    """Return a decomposition of an operator that joins tensors, some of which may be real."""
    by_part = _by_part(op)

    def parts(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        dtype = reduce(torch.promote_types, [t.dtype for t in tensors])
        return by_part([_converted(t, dtype=dtype) for t in tensors], dim)

    return parts


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    dtype = torch.result_type(a, b)
    chosen = (_converted(a, dtype=dtype), _converted(b, dtype=dtype))
    return _by_part(aten.where.self)(condition, *chosen)


def _padded(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    pairs = zip(_parts(x), (value.real, value.imag), strict=True)
    return _pair(*(aten.constant_pad_nd(part, pad, number) for part, number in pairs))


_ARITHMETIC: dict[Any, Function] = {
    aten.add.Tensor: _sum,
    aten.add.Scalar: _sum,
    aten.sub.Tensor: _difference,
    aten.sub.Scalar: _difference,
    aten.rsub.Scalar: lambda a, b, alpha=1: _difference(b, a) if alpha == 1 else NotImplemented,
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.div.Tensor: _quotient,
    aten.div.Scalar: _quotient,
    aten.reciprocal.default: lambda x: _quotient(torch.ones_like(_parts(x)[0]), x),
    aten.pow.Tensor_Scalar: _power,
    aten.square.default: lambda x: _product(x, x),
    aten.exp.default: _exponential,
    aten.abs.default: _magnitude,
    aten.angle.default: _angle,
    aten.eq.Tensor: _is_equal,
    aten.eq.Scalar: _is_equal,
    aten.ne.Tensor: lambda a, b: ~_is_equal(a, b),
    aten.ne.Scalar: lambda a, b: ~_is_equal(a, b),
    aten._conj.default: _conjugate,
    aten._conj_physical.default: _conjugate,
    aten.conj_physical.default: _conjugate,
    aten.real.default: lambda x: _parts(x)[0],
    aten.imag.default: lambda x: _parts(x)[1],
    aten.where.self: _where,
    aten.constant_pad_nd.default: _padded,
    **{op: _joined(op) for op in (aten.cat.default, aten.stack.default)},
    **{op: _matrix_product(op) for op in (aten.mm.default, aten.bmm.default, aten.matmul.default)},
}
_MAKE_COMPLEX: dict[Any, Function] = {
    aten.complex.default: _from_parts,
    aten.polar.default: _polar,
    aten._to_copy.default: _to_copy,
}
_BY_PART = (
    aten.alias.default, aten.clone.default, aten.detach.default,
    aten.diagonal.default, aten.expand.default, aten.flip.default, aten.gather.default,
    aten.index.Tensor, aten.index_select.default, aten.mean.default, aten.mean.dim,
    aten.neg.default, aten.permute.default, aten.repeat.default, aten.reshape.default,
    aten.resolve_conj.default, aten.resolve_neg.default, aten.roll.default, aten.select.int,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.sum.default,
    aten.sum.dim_IntList, aten.t.default, aten.transpose.int, aten.unbind.int, aten.unfold.default,
    aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten.cumsum.default,
)  # fmt: skip
