"""Values that forward reaches without a name in its own code: a change is seen by the next call."""

from __future__ import annotations

import decimal
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch

Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]


class Scale:
    factor = 2.0

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor


def _scaled(x: torch.Tensor, by: float = 2.0, *, more: float = 1.0) -> torch.Tensor:
    return x * by * more


def _new(function: Any) -> Any:
    """Return a copy of a function, which a case may change."""
    made = types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, dict(function.__kwdefaults__)
    return made


def _function_in_a_closure() -> Case:
    act: Any = torch.sin

    def change() -> None:
        nonlocal act
        act = torch.cos

    return lambda x: act(x), change


def _class_in_a_closure() -> Case:
    kind = type("Kind", (Scale,), {"factor": 2.0})
    return lambda x: x * kind.factor, lambda: setattr(kind, "factor", 3.0)


def _object_of_a_method() -> Case:
    method = (scale := Scale()).times
    return lambda x: method(x), lambda: setattr(scale, "factor", 3.0)


def _class_of_a_method() -> Case:
    kind: Any = type("Kind", (Scale,), {"factor": 2.0})
    method = kind.of_class
    return lambda x: method(x), lambda: setattr(kind, "factor", 3.0)


def _defaults_in_a_closure() -> Case:
    function = _new(_scaled)
    return lambda x: function(x), lambda: setattr(function, "__defaults__", (3.0,))


def _default_by_name() -> Case:
    function = _new(_scaled)
    return lambda x: function(x), lambda: function.__kwdefaults__.update(more=3.0)


def _arguments_of_a_partial() -> Case:
    function = functools.partial(_scaled, by=2.0)
    return lambda x: function(x), lambda: function.keywords.update(by=3.0)


def _defaults_in_a_list() -> Case:
    functions = [_new(_scaled)]
    return lambda x: functions[0](x), lambda: setattr(functions[0], "__defaults__", (3.0,))


def _method_in_a_dict() -> Case:
    methods = {"a": (scale := Scale()).times}
    return lambda x: methods["a"](x), lambda: setattr(scale, "factor", 3.0)


def _function_in_two_dicts() -> Case:
    functions: Any = {"a": {"b": torch.sin}}
    return lambda x: functions["a"]["b"](x), lambda: functions["a"].update(b=torch.cos)


def _decimal() -> Case:
    numbers = [decimal.Decimal("2")]
    return lambda x: x * float(numbers[0]), lambda: numbers.__setitem__(0, decimal.Decimal("3"))


def _context_of_decimals() -> Case:
    numbers = [decimal.Decimal(2)]
    context = decimal.getcontext()
    return lambda x: x * float(numbers[0] / 3), lambda: setattr(context, "prec", 3)


class _Rate:
    def __init__(self) -> None:
        self.value = decimal.Decimal(2)


def _context_of_decimals_in_objects() -> Case:
    held, context = _Rate(), decimal.getcontext()
    return lambda x: x * float(held.value / 3), lambda: setattr(context, "prec", 3)


def _setting_of_python() -> Case:
    limit = sys.getrecursionlimit()
    return lambda x: x * sys.getrecursionlimit(), lambda: sys.setrecursionlimit(limit + 1)


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    with decimal.localcontext():
        yield
    sys.setrecursionlimit(limit)


def _metaclass() -> Case:
    meta: Any = type("Meta", (type,), {"factor": 2.0})
    kind = meta("Kind", (), {})
    return lambda x: x * kind.factor, lambda: setattr(meta, "factor", 3.0)


def _slice() -> Case:
    parts = [slice(0, 2)]
    return lambda x: x[parts[0]] * 2.0, lambda: parts.__setitem__(0, slice(1, 3))


def _gradient() -> Case:
    factors = {"a": 2.0}

    def helper(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * factors["a"]

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return helper(gradient)

    return lambda x: Twice.apply(x), lambda: factors.update(a=3.0)


CASES = [v for n, v in list(vars().items()) if isinstance(v, types.FunctionType) and n[0] == "_"]
CASES = [case for case in CASES if case not in (_scaled, _new)]


class _Calling(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", thinned(CASES, 2), ids=lambda case: case.__name__.strip("_"))
def test_a_change_is_seen(case: Callable[[], Case]) -> None:
    function, change = case()
    module = _Calling(function)
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    add_tvm_dispatch(module, x, options={"only_if_faster": False}, on_fallback="silent")

    def compare() -> None:
        ours, theirs = module(x), function(x)
        torch.testing.assert_close(ours, theirs)
        (one,), (other,) = (torch.autograd.grad(y.sum(), x) for y in (ours, theirs))
        torch.testing.assert_close(one, other)

    compare()
    assert "forward" in module.__dict__
    change()
    compare()


def test_an_attribute_has_other_defaults() -> None:
    module = _Calling(_new(_scaled))
    x = torch.ones(3)
    add_tvm_dispatch(module, x, options={"only_if_faster": False}, on_fallback="silent")
    module.function.__defaults__ = (3.0,)
    torch.testing.assert_close(module(x), x * 3.0)
