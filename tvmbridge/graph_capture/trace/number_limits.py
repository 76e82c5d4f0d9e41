"""Limits of traced numbers: values for which PyTorch treats a number and a tensor differently.

Such values are left out of the values that the code serves, if the number is an argument of
forward. A number that is computed from an argument is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.graph_capture.trace.traced_numbers import TracedNumber

_COMPARED = "eq ne lt le gt ge less less_equal greater greater_equal not_equal"
_COMPARISONS = frozenset(_COMPARED.split())
_SUMS = frozenset(("add", "sub", "subtract"))
_PRODUCTS = frozenset(("mul", "multiply"))
_QUOTIENTS = frozenset(("div", "divide", "truediv", "true_divide"))
_CLAMPS = frozenset(("clamp", "clip", "clamp_min", "clamp_max"))
# Functions of integers whose results, or errors, do not differ for a tensor of the number.
_EXACT_FOR_INTEGERS = _COMPARISONS | _SUMS | _PRODUCTS | _QUOTIENTS | _CLAMPS
_POWERS = frozenset(("pow", "ipow"))
_HALVES = (torch.float16, torch.bfloat16)
# Dtypes that do not have all values of a range. For a number beyond them, PyTorch raises an error,
# where the conversion of a tensor gives an infinity or another integer.
_NARROW = {d: torch.iinfo(d).max for d in (torch.int8, torch.int16, torch.uint8, torch.int32)}
_NARROW[torch.float16] = int(torch.finfo(torch.float16).max)
# Float32 has all integers up to this one, and so knows odd exponents from even ones.
_MOST_EXPONENT = 1 << 24


def limit(
    func: Callable[..., Any],
    number: TracedNumber,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> None:
    """Leave out values of ``number`` for which ``func`` treats numbers and tensors differently.

    Raises:
        NumberReadError: the values cannot be left out.
    """
    tensors = [v for v in (*args, *named.values()) if isinstance(v, torch.Tensor)]
    name, plain = func.__name__.strip("_"), _plain(func)
    of_integers = not any(t.is_floating_point() or t.is_complex() for t in tensors)
    rounded = named.get("rounding_mode") is not None
    with_integer = of_integers and number.kind is int
    dtypes = {t.dtype for t in tensors}
    # A division of integers by zero raises an error, and a power may be too large.
    unsafe = with_integer and (plain not in _EXACT_FOR_INTEGERS or rounded)
    unsafe |= plain in _COMPARISONS and not dtypes.isdisjoint({*_NARROW, torch.bool})
    # A tensor with dimensions takes the value unrounded, beside one without it is rounded first.
    unsafe |= any(not t.dim() and t.dtype in _HALVES for t in tensors)
    unsafe |= with_integer and plain in _QUOTIENTS and any(not _fits(number, t) for t in tensors)
    if unsafe:
        shown = ", ".join(str(t.dtype) for t in tensors)
        raise number.refused(f"passes it to {func.__name__} with {shown}")
    is_exponent = name in _POWERS and args[0] is not number
    if plain in _CLAMPS or is_exponent:
        fit(number, tensors, func)
    if is_exponent and (number.argument is not None or number.kind is int):
        _bound(number, _MOST_EXPONENT, func)


def fit(number: TracedNumber, tensors: Sequence[torch.Tensor], func: Callable[..., Any]) -> None:
    """Leave out values that the dtype of the result of ``func`` does not have."""
    for tensor in tensors:
        most = _NARROW.get(torch.result_type(tensor, like(number)))
        if most is not None:
            _bound(number, most, func)


def like(number: TracedNumber) -> float:
    """Return a number of the class of ``number``, for its promotion of tensors."""
    return 1 if number.kind is int else 1.5


def is_unrounded(
    func: Callable[..., Any], args: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether ``func`` computes with a tensor of half precision and a number in float32."""
    if len(tensors) != 1 or tensors[0].dtype not in _HALVES:
        return False
    plain = _plain(func)
    divides = plain in _QUOTIENTS or plain in ("floor_divide", "floordiv")
    return plain in _PRODUCTS or (divides and bool(args) and args[0] is tensors[0])


def _plain(func: Callable[..., Any]) -> str:
    """Return the name of a function without marks of methods, in-place and reflected forms."""
    name = func.__name__.strip("_")
    known = name in _EXACT_FOR_INTEGERS
    return name if known else name.removeprefix("r").removeprefix("i")


def _fits(number: TracedNumber, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has dimensions, or has a dtype with all values of ``number``."""
    return bool(tensor.dim()) or number.most <= _NARROW.get(tensor.dtype, number.most)


def _bound(number: TracedNumber, most: float, func: Callable[..., Any]) -> None:
    """Leave out values whose absolute value exceeds ``most``."""
    if number.argument is not None:
        number.argument.narrow(NumberRange(number.kind, -most, most))
    elif not number.most <= most:
        raise number.refused(f"passes it to {func.__name__}, for which it may be too large")
