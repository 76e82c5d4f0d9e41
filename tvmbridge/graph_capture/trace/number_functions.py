"""PyTorch functions of traced numbers: the number becomes a tensor that promotes as a number does.

A Python number does not promote a tensor within its category: ``float32 + 0.5`` is float32. A
zero-dimensional tensor of float64 behaves so beside a tensor with dimensions alone, so it is
converted where the result would have another dtype.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.trace.number_limits import fit, is_unrounded, like, limit
from tvmbridge.graph_capture.trace.traced_numbers import TracedNumber

_Function = Callable[..., Any]
_Handler = Callable[[_Function, tuple[Any, ...], dict[str, Any]], Any]

# The modules of PyTorch's functions that are written in Python, and what these ask modes by.
_IN_PYTHON = ("torch.nn.functional", "torch.functional")
_ASKING_MODES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_EXACT_FLOATS = (torch.float32, torch.float64)
# The dtypes that the numbers within the limits of a range are converted to without an error.
_FILLED = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


class NumberFunctions(TorchFunctionMode):
    """The mode that calls PyTorch's functions with tensors in place of traced numbers.

    Raises:
        NumberReadError: a function takes a number that must be known when code is compiled.
    """

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        numbers = numbers_in((args, named))
        if not numbers:
            return func(*args, **named)
        handler = _HANDLERS.get(func)
        python = isinstance(func, types.FunctionType) and func.__module__ in _IN_PYTHON
        if handler is None and python:
            with self:
                return _inside(func)(*args, **named)
        if handler is None:
            raise numbers[0].refused(f"passes it to {getattr(func, '__name__', func)}")
        return handler(func, tuple(args), dict(named))


def _inside(func: types.FunctionType) -> Callable[..., Any]:
    """Return a function with the code of ``func`` that does not ask modes whether to run it."""
    known = {**func.__globals__, **dict.fromkeys(_ASKING_MODES, lambda *_: False)}
    inside = types.FunctionType(
        func.__code__, known, func.__name__, func.__defaults__, func.__closure__
    )
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside


def numbers_in(value: Any) -> list[TracedNumber]:
    """Return the traced numbers among the leaves of ``value``."""
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is TracedNumber]


def _operands(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call ``func`` with tensors that give its result the dtype that numbers would give it."""
    if type(named.get("out")) is TracedNumber:
        raise numbers_in(named)[0].refused(f"passes it to {func.__name__} as out")
    if type(named.get("alpha")) is TracedNumber:
        args, named = _multiplied(func, args, named)
    given, by_name = list(args), dict(named)
    for number in numbers_in((args, named)):
        limit(func, number, args, named)
    tensors = [v for v in (*args, *named.values()) if isinstance(v, torch.Tensor)]
    given = [_promoted(v, tensors) for v in given]
    by_name = {k: _promoted(v, tensors) for k, v in named.items()}
    if not is_unrounded(func, args, tensors):
        return func(*given, **by_name)
    (half,) = tensors
    result = func(*[v.float() if v is half else v for v in given], **by_name)
    return half.copy_(result) if _is_in_place(func) else result.to(half.dtype)


def _multiplied(
    func: _Function, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a sum or difference whose second operand is multiplied by alpha."""
    named, alpha = dict(named), named["alpha"]
    del named["alpha"]
    tensor, other = _placed(args, named, ("input", "other"), func)
    use, most = f"passes it to {func.__name__} as alpha", torch.finfo(torch.float32).max
    if not all(isinstance(t, torch.Tensor) and t.dtype in _EXACT_FLOATS for t in (tensor, other)):
        raise alpha.refused(use)
    # PyTorch raises an error for a finite number that float32 does not have.
    if alpha.argument is None and not (
        alpha.decided(operator.le, most, use) and alpha.decided(operator.ge, -most, use)
    ):
        raise alpha.refused(use)
    return (tensor, _times(other, alpha)), {}


def _times(tensor: torch.Tensor, number: TracedNumber) -> Any:
    return _operands(torch.mul, (tensor, number), {})


def _pow(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call ``pow``. PyTorch takes the square root for 0.5: negative infinity has none."""
    base, exponent = _placed(args, named, ("input", "exponent"), func)
    if type(exponent) is not TracedNumber or exponent.kind is int or type(base) in (int, float):
        return _operands(func, (base, exponent), {})
    if base.dtype is torch.float16:  # the root of negative infinity depends on the device
        raise exponent.refused(f"passes it to {func.__name__} with {base.dtype}")
    without_root = (exponent.tensor == 0.5) & (base == -math.inf)
    result = _operands(func, (base, exponent), {})
    fill = result.masked_fill_ if _is_in_place(func) else result.masked_fill
    return fill(without_root, math.nan)


def _is_in_place(func: _Function) -> bool:
    name = func.__name__
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def _promoted(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(value) is not TracedNumber:
        return value
    for tensor in tensors[:1]:
        wanted = torch.result_type(tensor, like(value))
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
    for number in numbers_in((left, right)):
        fit(number, tensors, func)
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
    tensor, *limits = _placed(args, named, ("input", "min", "max"), func)
    least, most = limits
    if least is None or most is None or {type(least), type(most)} == {TracedNumber}:
        return _operands(func, args, named)
    if not _is_in_place(func):
        func = torch.clamp
        for each in limits:
            wanted = like(each) if type(each) is TracedNumber else each
            tensor = tensor.to(torch.result_type(tensor, wanted))
    return _operands(func, (_operands(func, (tensor,), {"min": least}),), {"max": most})


def _lerp(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    start, end, weight = _placed(args, named, ("input", "end", "weight"), func)
    if type(weight) is not TracedNumber or numbers_in((start, end)):
        raise numbers_in((args, named))[0].refused("passes it to lerp as a tensor")
    if start.dtype in (torch.float16, torch.bfloat16):
        raise weight.refused(f"passes it to lerp with {start.dtype}")
    return func(start, end, weight.tensor.to(start.dtype))


def _cross_entropy(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call ``cross_entropy`` with label smoothing, as the sum that PyTorch computes."""
    by_name = inspect.signature(func).bind(*args, **named).arguments
    x, target, smoothing = (by_name.pop(n, None) for n in ("input", "target", "label_smoothing"))
    older = by_name.get("size_average") is not None or by_name.get("reduce") is not None
    if type(smoothing) is not TracedNumber or x.dtype not in _EXACT_FLOATS or older:
        raise numbers_in((args, named))[0].refused(f"passes it to {func.__name__} with {x.dtype}")
    use = f"passes it to {func.__name__}"
    if not (smoothing.decided(operator.ge, 0.0, use) and smoothing.decided(operator.le, 1.0, use)):
        raise smoothing.refused(f"{use} beyond its limits")
    dim = 0 if x.dim() == 1 else 1
    number: Any = smoothing  # Its operators are set in a loop.
    share, rest = number / x.shape[dim], 1 - number
    if target.is_floating_point():
        smoothed = _operands(torch.add, (_times(target, rest), share), {})
        return func(x, smoothed, **by_name)
    plain, weight = func(x, target, **by_name), by_name.get("weight")
    left_out, reduction = target == by_name.get("ignore_index", -100), by_name.get("reduction")
    logs, counts = -torch.log_softmax(x, dim), (~left_out).to(x.dtype)
    if weight is not None:
        logs = logs * weight.reshape(-1, *[1] * (x.dim() - 1 - dim))
        counts = counts * weight[target.masked_fill(left_out, 0)]
    others = logs.sum(dim).masked_fill(left_out, 0.0)
    if reduction != "none":
        others = others.sum()
    if reduction not in ("none", "sum"):
        others = others / counts.sum()
    return torch.where(smoothing.tensor == 0.0, plain, _times(plain, rest) + _times(others, share))


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
    if "fill_value" in named:
        made = func(*args, **{**named, "fill_value": like(place)})
    else:
        made = func(*args[:-1], like(place), **named)
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
    numberless = [like(v) if type(v) is TracedNumber else v for v in leaves]
    rest = {k: v for k, v in named.items() if k not in ("data", "s")}
    made = func(pytree.tree_unflatten(numberless, structure), *args[1:], **rest)
    each = [
        _fillable(v, made.dtype, func).clone()
        if type(v) is TracedNumber
        else torch.full((), v, dtype=made.dtype, device=made.device)
        for v in leaves
    ]
    return each[0] if not made.dim() else torch.stack(each).reshape(made.shape)


def _place(tensor: Any, index: Any) -> tuple[int, TracedNumber, torch.Tensor]:
    """Return the dimension that a number indexes, the number, and the place as a tensor."""
    each = [*index] if isinstance(index, tuple) else [index]
    if isinstance(tensor, torch.Tensor) and any(part is Ellipsis for part in each):
        i = next(i for i, part in enumerate(each) if part is Ellipsis)
        each[i : i + 1] = [slice(None)] * (tensor.dim() - len(each) + 1)
    *others, number = sorted(each, key=lambda part: type(part) is TracedNumber)
    whole = all(isinstance(part, slice) and part == slice(None) for part in others)
    if not (isinstance(tensor, torch.Tensor) and type(number) is TracedNumber and whole):
        raise numbers_in(each)[0].refused("indexes by it and by something else")
    dim = next(i for i, part in enumerate(each) if part is number)
    known = number.of.ranges[min(number.leaves)]
    if number.kind is not int:
        raise number.refused("indexes by it")
    size = tensor.shape[dim] if dim < tensor.dim() else 0
    if not isinstance(size, int):
        raise number.refused("indexes a symbolic dimension by it")
    if number.shift is not None and size:
        known.narrow(NumberRange(int, -size - number.shift, size - 1 - number.shift))
    elif not number.most < size:
        raise number.refused("indexes by a number that is computed from it")
    return dim, number, torch.remainder(number.tensor, size).reshape(1)


def _item(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Select a part of a tensor by a number, as a copy."""
    tensor, index = args
    dim, number, place = _place(tensor, index)
    result = torch.index_select(tensor, dim, place).squeeze(dim)
    # Eager PyTorch returns a view: a write into it, or into the tensor, would reach the other.
    number.of.selected += [(t, t._version) for t in (tensor, result)]
    return result


def _set_item(func: _Function, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Write into the part of a tensor that a number selects."""
    tensor, index, value = args
    if numbers := numbers_in(value):
        raise numbers[0].refused("writes it into a tensor")
    dim, _, place = _place(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    part = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    value = value.to(tensor.device, tensor.dtype).expand(part)
    tensor.index_copy_(dim, place, value.unsqueeze(dim))


_COMPARING = "eq ne lt le gt ge less less_equal greater greater_equal not_equal"
_EXACT = "add sub rsub subtract mul multiply div divide truediv true_divide"
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
_HANDLERS |= dict.fromkeys((*_functions(["pow", "float_power"]), torch.Tensor.__pow__), _pow)
_HANDLERS |= dict.fromkeys((torch.where,), _where)
_HANDLERS[F.cross_entropy] = _cross_entropy
_HANDLERS |= dict.fromkeys(_functions(["masked_fill"]), _masked_fill)
_HANDLERS |= dict.fromkeys((torch.full, torch.full_like, torch.Tensor.new_full), _full)
_HANDLERS |= dict.fromkeys((torch.fill, torch.fill_, torch.Tensor.fill_), _fill)
_HANDLERS |= dict.fromkeys((torch.tensor, torch.as_tensor, torch.scalar_tensor), _tensor)
_HANDLERS[torch.Tensor.__getitem__] = _item
_HANDLERS[torch.Tensor.__setitem__] = _set_item
