"""Traced numbers: they stand for Python numbers that are inputs of compiled code.

Forward may compute with a traced number as with an int or a float: the result is another traced
number, or a tensor. Where forward compares one with a number, the trace holds for the values with
the sample's outcome. Where Python needs the value itself (an index, a size, ``range``), the trace
is refused with the line.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tvmbridge.core.contents import NumberStandIn
from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.number_inputs import NumberRange

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_INT64, _EXACT_FLOATS = 1 << 63, 1 << 53
# The largest exponent that a product of factors computes as Python does.
_MOST_EXPONENT = 4
# The largest base of such a power: a result beyond the floats raises an error in Python.
_MOST_BASE = 1e70


class NumbersOfCall:
    """The numbers of one traced call.

    - ``ranges``: the values for which the trace holds, by the leaf of the arguments.
    - ``refusal``: the first use that cannot be traced; None: there was none.
    - ``selected``: tensors that a number has indexed, and copies of the selected parts, each with
      its version at that time.
    - ``made``: weak references to all traced numbers.
    """

    def __init__(self, ranges: dict[int, NumberRange]) -> None:
        self.ranges = ranges
        self.refusal: NumberReadError | None = None
        self.selected: list[tuple[torch.Tensor, int]] = []
        self.made: list[weakref.ref[TracedNumber]] = []

    def traced(self, leaf: int, tensor: torch.Tensor) -> TracedNumber:
        """Return the traced number of a leaf of the arguments."""
        known = self.ranges[leaf]
        most = max(abs(known.least), abs(known.most))
        return TracedNumber(self, known.kind, tensor, most, frozenset({leaf}), 0)

    def refused(self, number: TracedNumber, use: str) -> NumberReadError:
        """Return the error for a use of ``number`` that cannot be traced, and keep the first."""
        error = NumberReadError(f"forward {use}, at {_line()}", number.leaves)
        self.refusal = self.refusal or error
        return error


class TracedNumber(NumberStandIn):
    """Stands for an int or a float.

    - ``kind``: ``int`` or ``float``.
    - ``tensor``: the value, of int64 or float64.
    - ``most``: a bound of the absolute value, for numbers that are finite.
    - ``leaves``: the arguments that the value is computed from.
    - ``shift``: the integer by which it exceeds an integer argument; None: it is something else.
    - ``computed``: returns the value for a value of its argument; None: it has several arguments.
    """

    __slots__ = ("__weakref__", "computed", "kind", "leaves", "most", "of", "shift", "tensor")

    def __init__(
        self,
        of: NumbersOfCall,
        kind: type,
        tensor: torch.Tensor,
        most: float,
        leaves: frozenset[int],
        shift: int | None = None,
    ) -> None:
        self.of, self.kind, self.tensor = of, kind, tensor
        self.most, self.leaves, self.shift = most, leaves, shift
        self.computed: Callable[[Any], Any] | None = _itself if shift == 0 else None
        of.made.append(weakref.ref(self))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.kind

    # Because of this method, PyTorch's functions accept a traced number, and modes receive it.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        number = next(value for value in values if type(value) is TracedNumber)
        raise number.refused(f"passes it to {getattr(func, '__name__', func)}")

    def __hash__(self) -> int:
        raise self.refused("uses it as a key")

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.kind(), name):
            raise self.refused(f"reads its attribute {name}")
        raise AttributeError(f"'{self.kind.__name__}' object has no attribute '{name}'")

    def __copy__(self) -> TracedNumber:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedNumber:
        return self

    def __neg__(self) -> TracedNumber:
        result = _result((self,), self.kind, torch.neg(self.tensor), self.most)
        return _with_value(result, operator.neg, self)

    def __abs__(self) -> TracedNumber:
        result = _result((self,), self.kind, torch.abs(self.tensor), self.most)
        return _with_value(result, operator.abs, self)

    def __bool__(self) -> bool:
        return self.decided(operator.ne, 0, "branches on it")

    def __pos__(self) -> TracedNumber:
        return self

    def refused(self, use: str) -> NumberReadError:
        """Return the error for a use that cannot be traced."""
        return self.of.refused(self, use)

    def decided(self, comparison: Callable[[Any, Any], bool], other: Any, use: str) -> bool:
        """Return the outcome of a comparison; the trace holds for values with this outcome."""
        known = self.of.ranges[min(self.leaves)]
        if self.computed is None or known.sample is None:
            raise self.refused(use)
        return known.decided(self.computed, comparison, other)

    @property
    def argument(self) -> NumberRange | None:
        """The range of the argument that this number is; None if it is computed from one."""
        return self.of.ranges[min(self.leaves)] if self.shift == 0 else None

    def in_float64(self) -> torch.Tensor:
        """Return the value in float64, rounded as Python rounds it."""
        return self.tensor.to(torch.float64)


Number = TracedNumber | int | float


def _itself(value: Any) -> Any:
    return value


def _with_value(result: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """Note in ``result`` how its value is computed by ``function`` from those of ``operands``."""
    if type(result) is not TracedNumber or len(result.leaves) > 1:
        return result
    values: list[Callable[[Any], Any]] = []
    for operand in operands:
        value = operand.computed if type(operand) is TracedNumber else _constant(operand)
        if value is None:
            return result
        values.append(value)
    result.computed = lambda given: function(*(value(given) for value in values))
    return result


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda given: value


def _line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _of(value: Any, dtype: torch.dtype) -> Any:
    """Return an operand of a computation in ``dtype``."""
    if type(value) is TracedNumber:
        return value.tensor if dtype is torch.int64 else value.in_float64()
    return value if dtype is torch.int64 else float(value)


def _bound(value: Any) -> float:
    return value.most if type(value) is TracedNumber else abs(value)


def _kind(value: Any) -> type:
    if type(value) is TracedNumber:
        return value.kind
    return int if isinstance(value, int) else float


def _result(
    numbers: tuple[Any, ...], kind: type, tensor: torch.Tensor, most: float
) -> TracedNumber:
    traced = [number for number in numbers if type(number) is TracedNumber]
    if kind is int and most >= _INT64:
        raise traced[0].refused("computes an integer from it that may exceed 64 bits")
    leaves = frozenset().union(*(number.leaves for number in traced))
    return TracedNumber(traced[0].of, kind, tensor, most, leaves)


def _sum(left: Any, right: Any, sign: int) -> Any:
    kind = float if float in (_kind(left), _kind(right)) else int
    dtype = torch.int64 if kind is int else torch.float64
    function = torch.add if sign > 0 else torch.sub
    a, b = _of(left, dtype), _of(right, dtype)
    if not isinstance(a, torch.Tensor):
        tensor = torch.add(b if sign > 0 else torch.neg(b), a)
    else:
        tensor = function(a, b)
    result = _result((left, right), kind, tensor, _bound(left) + _bound(right))
    if kind is int and type(right) is int and left.shift is not None:
        result.shift = left.shift + sign * right
    if kind is int and type(left) is int and right.shift is not None and sign > 0:
        result.shift = right.shift + left
    return result


def _product(left: Any, right: Any) -> Any:
    kind = float if float in (_kind(left), _kind(right)) else int
    dtype = torch.int64 if kind is int else torch.float64
    a, b = _of(left, dtype), _of(right, dtype)
    tensor = torch.mul(a, b) if isinstance(a, torch.Tensor) else torch.mul(b, a)
    return _result((left, right), kind, tensor, _bound(left) * _bound(right))


def _divisor(left: Any, right: Any) -> Any:
    """Return ``right`` if it is no zero; a zero raises in Python, and not in compiled code."""
    if type(right) is TracedNumber:
        if right.argument is not None:
            right.argument.nonzero = True
        elif right.computed is None or not right.decided(operator.ne, 0, "divides by it"):
            raise right.refused("divides by a number that is computed from it")
    elif not right:
        raise left.refused("divides it by zero")
    return right


def _quotient(left: Any, right: Any) -> Any:
    right = _divisor(left, right)
    # Python divides large integers before it rounds.
    if _kind(left) is _kind(right) is int and max(_bound(left), _bound(right)) > _EXACT_FLOATS:
        number = left if type(left) is TracedNumber else right
        raise number.refused("divides integers that may be too large")
    a, b = _of(left, torch.float64), _of(right, torch.float64)
    if not isinstance(a, torch.Tensor):
        a = torch.full((), a, dtype=torch.float64)
    least = abs(right) if type(right) is not TracedNumber else 1 if right.kind is int else 0
    most = _bound(left) / least if least else math.inf
    return _result((left, right), float, torch.div(a, b), most)


def _quotient_of_tensors(left: Any, right: Any) -> Any:
    if isinstance(left, torch.Tensor):
        return torch.true_divide(left, right)
    # As PyTorch divides a number by a tensor. The reciprocal may overflow in half precision.
    return torch.reciprocal(right) * left


def _whole(left: Any, right: Any, function: Callable[..., torch.Tensor]) -> Any:
    """Compute ``//`` or ``%`` of an integer by a constant."""
    if type(left) is not TracedNumber or left.kind is not int or type(right) is not int:
        number = left if type(left) is TracedNumber else right
        raise number.refused("computes // or % of it, by other numbers than integer constants")
    right = _divisor(left, right)
    most = abs(right) - 1 if function is torch.remainder else left.most
    return _result((left,), int, function(left.tensor, right), most)


def _floor(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
    return torch.div(tensor, divisor, rounding_mode="floor")


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is TracedNumber:
        known = type(exponent) is int and 0 < exponent <= _MOST_EXPONENT
        if not known or base.most > _MOST_BASE:
            raise base.refused(f"computes a power of it, other than 1 to {_MOST_EXPONENT}")
        result = base
        for _ in range(exponent - 1):
            result = _product(result, base)
        return result
    if not (type(base) is float and 0.0 < base <= 1.0 and exponent.shift is not None):
        raise exponent.refused("computes a power with it as the exponent")
    # A negative exponent may overflow, for which Python raises an error.
    range_ = exponent.of.ranges[min(exponent.leaves)]
    range_.least = max(range_.least, -exponent.shift)
    tensor = torch.pow(torch.full((), base, dtype=torch.float64), exponent.in_float64())
    return _result((exponent,), float, tensor, 1.0)


_COMPUTED: dict[str, tuple[Callable[[Any, Any], Any], Callable[..., Any]]] = {
    "add": (lambda a, b: _sum(a, b, 1), torch.add),
    "sub": (lambda a, b: _sum(a, b, -1), torch.sub),
    "mul": (_product, torch.mul),
    "truediv": (_quotient, _quotient_of_tensors),
    "floordiv": (lambda a, b: _whole(a, b, _floor), torch.floor_divide),
    "mod": (lambda a, b: _whole(a, b, torch.remainder), torch.remainder),
    "pow": (_power, torch.pow),
}
_COMPARED = {name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _computing(name: str, reflected: bool) -> Callable[..., Any]:
    numbers, tensors = _COMPUTED[name]

    def method(self: TracedNumber, other: Any) -> Any:
        if type(other) is bool:
            other = int(other)
        if type(other) not in (int, float, TracedNumber) and not isinstance(other, torch.Tensor):
            if isinstance(other, int | float):
                raise self.refused(f"computes with it and a {type(other).__name__}")
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        if isinstance(other, torch.Tensor):
            return tensors(*pair)
        return _with_value(numbers(*pair), getattr(operator, name), *pair)

    return method


def _comparing(name: str) -> Callable[..., Any]:
    def method(self: TracedNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return _COMPARED[name](self, other)
        if other is None or isinstance(other, str):
            return NotImplemented
        if type(other) in (int, float, bool):
            return self.decided(getattr(operator, name), other, "compares it with a number")
        raise self.refused("compares it with a number")

    return method


def _reading(use: str) -> Callable[..., Any]:
    def method(self: TracedNumber, *_: Any) -> Any:
        raise self.refused(use)

    return method


def _converting(name: str, use: str) -> Callable[..., Any]:
    """Return a method that gives Python the sample's integer, for which alone the trace holds."""
    function = getattr(math, name, None) or getattr(operator, name, None) or getattr(builtins, name)

    def method(self: TracedNumber, *args: Any) -> Any:
        computed, sample = self.computed, self.of.ranges[min(self.leaves)].sample
        # A value of its own, such as a counter, would need code for each value that comes.
        if self.shift is not None or computed is None or sample is None or args:
            raise self.refused(use)
        whole = TracedNumber(self.of, int, self.tensor, self.most, self.leaves)
        whole.computed = lambda given: function(computed(given))
        value = whole.computed(sample)
        whole.decided(operator.eq, value, use)
        return value

    return method


_READ = {
    "converts it to a float": "float",
    "converts it to a complex number": "complex",
    "writes it as text": "repr str format",
    "computes with its bits": "and rand or ror xor rxor lshift rlshift rshift rrshift invert",
    "divides it with a remainder": "divmod rdivmod",
    "copies it": "reduce reduce_ex array",
}
for _name in _COMPUTED:
    setattr(TracedNumber, f"__{_name}__", _computing(_name, False))
    setattr(TracedNumber, f"__r{_name}__", _computing(_name, True))
for _name in _COMPARED:
    setattr(TracedNumber, f"__{_name}__", _comparing(_name))
for _use, _names in _READ.items():
    for _name in _names.split():
        setattr(TracedNumber, f"__{_name}__", _reading(_use))
for _name in ("int", "trunc", "round", "floor", "ceil"):
    setattr(TracedNumber, f"__{_name}__", _converting(_name, "converts it to an int"))
TracedNumber.__index__ = _converting("index", "uses it as an index or a size")  # type: ignore[attr-defined]
