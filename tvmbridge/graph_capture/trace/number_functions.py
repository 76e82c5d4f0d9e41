"""PyTorch functions of traced numbers: the number becomes a tensor that promotes as a number does.

A Python number does not promote a tensor within its category: ``float32 + 0.5`` is float32. A
zero-dimensional tensor of float64 behaves so beside a tensor with dimensions alone, so it is
converted where the result would have another dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.trace.traced_numbers import NumbersOfCall, TracedNumber

_Function = Callable[..., Any]
_Handler = Callable[[_Function, tuple[Any, ...], dict[str, Any]], Any]

# The dtypes that the numbers within the limits of a range are converted to without an error.
_FILLED = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


class NumberFunctions(TorchFunctionMode):
    """The mode that calls PyTorch's functions with tensors in place of traced numbers.

    Raises:
        NumberReadError: a function takes a number that must be known when code is compiled.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        numbers = numbers_in((args, named))
        if not numbers:
            return func(*args, **named)
        handler = _HANDLERS.get(func)
        if handler is None:
            raise numbers[0].refused(f"passes it to {getattr(func, '__name__', func)}")
        return handler(func, tuple(args), dict(named))


def numbers_in(value: Any) -> list[TracedNumber]:
    """Return the traced numbers among the leaves of ``value``."""
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is TracedNumber]


def _operands(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call ``func`` with tensors that give its result the dtype that numbers would give it."""
    given, by_name = list(args), dict(named)
    if any(type(v) is TracedNumber for k, v in named.items() if k in ("alpha", "out")):
        raise numbers_in(named)[0].refused(f"passes it to {func.__name__} as alpha")
    tensors = [v for v in (*args, *named.values()) if isinstance(v, torch.Tensor)]
    for number in numbers_in((args, named)):
        if _is_unsafe(func, number, tensors):
            dtypes = ", ".join(str(t.dtype) for t in tensors)
            raise number.refused(f"passes it to {func.__name__} with {dtypes}")
    given = [_promoted(v, tensors) for v in given]
    by_name = {k: _promoted(v, tensors) for k, v in named.items()}
    return func(*given, **by_name)


def _is_unsafe(func: _Function, number: TracedNumber, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``func`` treats a number and a tensor of its value differently for some value."""
    of_integers = not any(t.is_floating_point() or t.is_complex() for t in tensors)
    name = func.__name__.strip("_").removeprefix("r")
    if of_integers and number.kind is int and name not in _EXACT_FOR_INTEGERS:
        return True
    narrow = (torch.int8, torch.int16, torch.uint8, torch.int32, torch.bool, torch.float16)
    return name in _COMPARISONS and any(t.dtype in narrow for t in tensors)


def _promoted(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(value) is not TracedNumber:
        return value
    like = 1 if value.kind is int else 1.5
    for tensor in tensors[:1]:
        wanted = torch.result_type(tensor, like)
        if torch.result_type(tensor, value.tensor) == wanted:
            return value.tensor
        return value.tensor.to(wanted)
    return value.tensor.to(torch.int64 if value.kind is int else torch.get_default_dtype())


def _where(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call ``where``, whose condition has no part in the dtype of the result."""
    names = ("condition", "input", "other")
    condition, left, right = _placed(args, named, names, func)
    if isinstance(left, bool | complex) or isinstance(right, bool | complex):
        raise numbers_in((left, right))[0].refused("passes it to where with another number")
    tensors = [v for v in (left, right) if isinstance(v, torch.Tensor)]
    if not tensors:
        kinds = {v.kind if type(v) is TracedNumber else type(v) for v in (left, right)}
        dtype = torch.get_default_dtype() if float in kinds else torch.int64
        left, right = (v.tensor.to(dtype) if type(v) is TracedNumber else v for v in (left, right))
        return torch.where(condition, left, right)
    return torch.where(condition, _promoted(left, tensors), _promoted(right, tensors))


def _placed(
    args: tuple[Any, ...], named: dict[str, Any], names: Sequence[str], func: _Function
) -> list[Any]:
    """Return the arguments of these names, None for those not given; refuse any others."""
    found = dict(zip(names, args, strict=False)) | named
    if len(args) > len(names) or not found.keys() <= {*names}:
        number = numbers_in((args, named))[0]
        raise number.refused(f"passes it to {func.__name__} with other arguments")
    return [found.get(name) for name in names]


def _clamp(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor, least, most = _placed(args, named, ("input", "min", "max"), func)
    if least is None or most is None or {type(least), type(most)} == {TracedNumber}:
        return _operands(func, args, named)
    return _operands(
        torch.clamp, (_operands(torch.clamp, (tensor,), {"min": least}),), {"max": most}
    )


def _lerp(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    start, end, weight = _placed(args, named, ("input", "end", "weight"), func)
    if type(weight) is not TracedNumber or numbers_in((start, end)):
        raise numbers_in((args, named))[0].refused("passes it to lerp as a tensor")
    return func(start, end, weight.tensor.to(start.dtype))


def _fillable(number: TracedNumber, dtype: torch.dtype, func: _Function) -> torch.Tensor:
    """Return the number in ``dtype``, if PyTorch converts all of its values without an error."""
    exact = dtype is torch.int32 and number.most < 1 << 31
    to_whole = number.kind is float and not dtype.is_floating_point
    if to_whole or not (dtype in _FILLED or exact):
        raise number.refused(f"passes it to {func.__name__} for {dtype}")
    return number.tensor.to(dtype)


def _full(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call ``full`` or one of its kind with another value, and fill the result."""
    numbers = numbers_in((args, named))
    place = args[-1] if "fill_value" not in named else named["fill_value"]
    if len(numbers) > 1 or type(place) is not TracedNumber or named.get("requires_grad"):
        raise numbers[0].refused(f"passes it to {func.__name__} as a size")
    like = 1 if place.kind is int else 1.5
    if "fill_value" in named:
        made = func(*args, **{**named, "fill_value": like})
    else:
        made = func(*args[:-1], like, **named)
    return made.fill_(_fillable(place, made.dtype, func))


def _fill(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor, value = _placed(args, named, ("input", "value"), func)
    return func(tensor, _fillable(value, tensor.dtype, func))


def _masked_fill(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor, mask, value = _placed(args, named, ("input", "mask", "value"), func)
    return func(tensor, mask, _fillable(value, tensor.dtype, func))


def _tensor(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Build the tensor that ``torch.tensor`` makes of numbers in nested lists."""
    numbers = numbers_in((args, named))
    data = named.get("data", args[0] if args else None)
    data = named.get("s", data) if func is torch.scalar_tensor else data
    leaves, structure = pytree.tree_flatten(data)
    plain = all(type(v) in (int, float, TracedNumber) for v in leaves)
    if named.get("requires_grad") or not plain or len(numbers) != len(numbers_in(data)):
        raise numbers[0].refused(f"passes it to {func.__name__} with other values")
    like = [(1 if v.kind is int else 1.5) if type(v) is TracedNumber else v for v in leaves]
    rest = {k: v for k, v in named.items() if k not in ("data", "s")}
    made = func(pytree.tree_unflatten(like, structure), *args[1:], **rest)
    each = [
        _fillable(v, made.dtype, func).clone()
        if type(v) is TracedNumber
        else torch.full((), v, dtype=made.dtype, device=made.device)
        for v in leaves
    ]
    return each[0] if not made.dim() else torch.stack(each).reshape(made.shape)


def _item(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Select a part of a tensor by a number, as a copy."""
    tensor, index = args
    *before, number = index if isinstance(index, tuple) else (index,)
    whole = all(isinstance(each, slice) and each == slice(None) for each in before)
    if not (isinstance(tensor, torch.Tensor) and type(number) is TracedNumber and whole):
        raise numbers_in((args, named))[0].refused("indexes by it and by something else")
    known = number.of.ranges[min(number.leaves)]
    if number.kind is not int:
        raise number.refused("indexes by it")
    if number.shift is None or len(before) >= tensor.dim():
        raise number.refused("indexes by a number that is computed from it")
    size = tensor.shape[len(before)]
    if not isinstance(size, int):
        raise number.refused("indexes a symbolic dimension by it")
    known.narrow(NumberRange(int, -size - number.shift, size - 1 - number.shift))
    place = torch.remainder(number.tensor, size).reshape(1)
    result = torch.index_select(tensor, len(before), place).squeeze(len(before))
    # Eager PyTorch returns a view: a write into it, or into the tensor, would reach the other.
    number.of.selected += [(t, t._version) for t in (tensor, result)]
    return result


_COMPARING = "eq ne lt le gt ge less less_equal greater greater_equal not_equal"
_COMPARISONS = frozenset(_COMPARING.split())
_EXACT = "add sub rsub subtract mul multiply div divide truediv true_divide"
_CLAMPS = "clamp clip clamp_min clamp_max"
# Functions of integers whose results, or errors, do not differ for a tensor of the number.
_EXACT_FOR_INTEGERS = _COMPARISONS.union(_EXACT.split(), _CLAMPS.split())
_OTHERS = "floor_divide remainder fmod pow float_power atan2 xlogy clamp_min clamp_max"
_OPERATIONS = (*_EXACT.split(), *_OTHERS.split(), *_COMPARING.split())
_DUNDERS = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv
rfloordiv ifloordiv mod rmod imod pow rpow ipow eq ne lt le gt ge
"""


def _functions(names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        for owner, suffix in ((torch, ""), (torch.Tensor, ""), (torch.Tensor, "_")):
            function = getattr(owner, f"{name}{suffix}", None)
            if function is not None:
                yield function


_HANDLERS: dict[Any, _Handler] = dict.fromkeys(_functions(_OPERATIONS), _operands)
_HANDLERS |= {
    f: _operands
    for n in _DUNDERS.split()
    if (f := getattr(torch.Tensor, f"__{n}__", None)) is not None
}
_HANDLERS |= dict.fromkeys(_functions(["clamp", "clip"]), _clamp)
_HANDLERS |= dict.fromkeys(_functions(["lerp"]), _lerp)
_HANDLERS |= dict.fromkeys((torch.where,), _where)
_HANDLERS |= dict.fromkeys(_functions(["masked_fill"]), _masked_fill)
_HANDLERS |= dict.fromkeys((torch.full, torch.full_like, torch.Tensor.new_full), _full)
_HANDLERS |= dict.fromkeys((torch.fill, torch.fill_, torch.Tensor.fill_), _fill)
_HANDLERS |= dict.fromkeys((torch.tensor, torch.as_tensor, torch.scalar_tensor), _tensor)
_HANDLERS[torch.Tensor.__getitem__] = _item


@contextmanager
def numbers_traced(
    module: nn.Module, ranges: dict[int, NumberRange]
) -> Iterator[Callable[[_Function, Any, Any], Any]]:
    """Yield a function that calls forward with traced numbers among its arguments.

    Args:
        module: the module whose forward is called.
        ranges: by the position of a leaf, the values of the number; the call narrows them.
    """
    of = NumbersOfCall(ranges)

    def call(forward: _Function, args: Any, kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        for i in ranges:
            leaves[i] = of.traced(i, leaves[i])
        given, named = pytree.tree_unflatten(leaves, structure)
        del leaves
        results = forward(*given, **named)
        del given, named
        _refuse_kept(of, module, results)
        return results

    with NumberFunctions():
        try:
            yield call
        except NumberReadError:
            raise
        except Exception:
            if of.refusal is None:
                raise
            raise of.refusal from None


def _refuse_kept(of: NumbersOfCall, module: nn.Module, results: Any) -> None:
    """Refuse numbers that outlive the call, and parts of tensors that must be views.

    Raises:
        NumberReadError: a number is returned or kept, or a selected part is returned, kept or
            written, or its tensor is written.
    """
    if of.refusal is not None:  # forward has caught it
        raise of.refusal
    for number in (known() for known in of.made):
        if number is not None:
            raise number.refused("returns it, or keeps it beyond the call")
    everywhere = frozenset(of.ranges)
    if any(tensor._version != version for tensor, version in of.selected):
        raise NumberReadError("forward writes into a tensor that it indexes by it", everywhere)
    storages = {t.untyped_storage()._cdata for t, _ in of.selected[1::2]}
    kept = [v for m in module.modules() for v in (*m.__dict__.values(), *m._buffers.values())]
    tensors = (v for v in pytree.tree_leaves((results, kept)) if isinstance(v, torch.Tensor))
    if storages and any(t.untyped_storage()._cdata in storages for t in tensors):
        raise NumberReadError("forward returns or keeps a part that it indexes by it", everywhere)
