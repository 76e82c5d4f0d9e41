"""Cases of the rules of element-wise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from tvm import relax

from tests.gradients.cases import INF, NAN, Case, integers, mask, normal, special
from tvmbridge.legalize.powers import SHORT_EXPONENTS

op = relax.op

_UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "negative": (op.negative, torch.neg),
    "exp": (op.exp, torch.exp),
    "log": (op.log, torch.log),
    "sqrt": (op.sqrt, torch.sqrt),
    "rsqrt": (op.rsqrt, torch.rsqrt),
    "sin": (op.sin, torch.sin),
    "cos": (op.cos, torch.cos),
    "tanh": (op.tanh, torch.tanh),
    "sigmoid": (op.sigmoid, torch.sigmoid),
    "erf": (op.erf, torch.erf),
    "abs": (op.abs, torch.abs),
    "nn.relu": (op.nn.relu, torch.relu),
    "nn.silu": (op.nn.silu, functional.silu),
    "nn.gelu": (op.nn.gelu, functional.gelu),
    "nn.gelu_tanh": (op.nn.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
}
_POSITIVE = ("log", "sqrt", "rsqrt")

_BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (op.add, torch.add),
    "subtract": (op.subtract, torch.sub),
    "multiply": (op.multiply, torch.mul),
    "divide": (op.divide, torch.div),
    "maximum": (op.maximum, torch.maximum),
    "minimum": (op.minimum, torch.minimum),
}


def const(value: float) -> relax.Expr:
    """Return a 0-d float64 constant in Relax."""
    return relax.const(value, "float64")


def scalar(value: float) -> torch.Tensor:
    """Return a 0-d float64 tensor."""
    return torch.tensor(value, dtype=torch.float64)


def unary_cases() -> Iterator[Case]:
    for name, (f, g) in _UNARY.items():
        rule = f"relax.{name}"
        x = normal(3, 4).abs() + 0.1 if name in _POSITIVE else normal(3, 4)
        yield Case(rule, "plain", f, g, (x,))
        yield Case(rule, "special", f, g, (special(),))
        yield Case(
            rule,
            "of-a-product",
            lambda x, f=f: op.multiply(x, f(op.multiply(x, x))),
            lambda x, g=g: x * g(x * x),
            (x,),
        )


def binary_cases() -> Iterator[Case]:
    shapes = {
        "same": ((3, 4), (3, 4)),
        "row": ((3, 4), (4,)),
        "row-left": ((4,), (2, 3, 4)),
        "column": ((3, 1), (3, 4)),
        "outer": ((3, 1), (1, 4)),
        "inner-ones": ((2, 1, 4), (1, 3, 1)),
        "0-d-left": ((), (3, 4)),
        "0-d-right": ((3, 4), ()),
        "0-d": ((), ()),
        "one-element": ((1,), (3,)),
    }
    for name, (f, g) in _BINARY.items():
        rule = f"relax.{name}"
        # Rules share the sum over broadcast dimensions, so one rule has all shapes.
        few = {form: shapes[form] for form in ("same", "row-left", "inner-ones", "0-d-right")}
        for form, (left, right) in (shapes if name == "divide" else few).items():
            yield Case(rule, form, f, g, (normal(*left), normal(*right, seed=1)))
        x = normal(3, 4)
        yield Case(rule, "itself", lambda x, f=f: f(x, x), lambda x, g=g: g(x, x), (x,))
        for value in (0.0, 1.0, -2.5) if name != "divide" else (1.0, -2.5):
            number = scalar(value)
            yield Case(
                rule,
                f"constant-right-{value}",
                lambda x, f=f, v=value: f(x, const(v)),
                lambda x, g=g, v=number: g(x, v),
                (integers(3, 4),),
            )
            yield Case(
                rule,
                f"constant-left-{value}",
                lambda x, f=f, v=value: f(const(v), x),
                lambda x, g=g, v=number: g(v, x),
                (integers(3, 4),),
            )
        yield Case(rule, "ties-and-zeros", f, g, (integers(5, 7), integers(5, 7, seed=1)))
        yield Case(rule, "ties-row", f, g, (integers(5, 7), integers(7, seed=1)))
        for kind, other in (("int", integers(3, 4).long()), ("bool", mask(4))):
            yield Case(
                rule,
                f"beside-{kind}",
                lambda x, m, f=f: f(x, op.astype(m, "float64")),
                lambda x, m, g=g: g(x, m.double()),
                (x, other),
            )


def power_cases() -> Iterator[Case]:
    for exponent in SHORT_EXPONENTS:
        for form, x in (("plain", normal(3, 4).abs() + 0.1), ("special", special())):
            yield Case(
                "relax.power",
                f"{form}-{exponent}",
                lambda x, e=exponent: op.power(x, const(e)),
                lambda x, e=exponent: torch.pow(x, e),
                (x,),
            )


def nan_cases() -> Iterator[Case]:
    left = torch.tensor([1.0, NAN, NAN, INF, -INF, INF], dtype=torch.float64)
    right = torch.tensor([NAN, 1.0, NAN, INF, INF, 0.0], dtype=torch.float64)
    for name, (f, g) in _BINARY.items():
        yield Case(f"relax.{name}", "not-finite", f, g, (left, right))


def where_cases() -> Iterator[Case]:
    forms = {
        "same": ((3, 4), (3, 4), (3, 4)),
        "row-condition": ((4,), (3, 4), (3, 4)),
        "column-condition": ((3, 1), (4,), (3, 4)),
        "0-d-condition": ((), (3, 4), (3, 4)),
        "0-d-left": ((3, 4), (), (3, 4)),
        "0-d-right": ((3, 4), (3, 4), ()),
        "wide-condition": ((2, 3, 4), (4,), (3, 1)),
        "0-d": ((), (), ()),
    }
    for form, (condition, left, right) in forms.items():
        inputs = (mask(*condition), normal(*left), normal(*right, seed=1))
        yield Case("relax.where", form, op.where, torch.where, inputs)
    yield Case(
        "relax.where",
        "masked-fill",
        lambda m, x: op.where(m, const(-INF), x),
        lambda m, x: torch.where(m, -INF, x),
        (mask(4), normal(3, 4)),
    )
    yield Case(
        "relax.where",
        "itself",
        lambda m, x: op.where(m, x, x),
        lambda m, x: torch.where(m, x, x),
        (mask(4), normal(3, 4)),
    )
    yield Case(
        "relax.where",
        "condition-of-the-operand",
        lambda x: op.where(op.greater(x, const(0.0)), x, op.multiply(x, const(0.1))),
        lambda x: torch.where(x > 0, x, x * 0.1),
        (normal(3, 4),),
    )
    yield Case(
        "relax.where",
        "nan-not-chosen",
        lambda x: op.where(op.greater(x, const(0.0)), op.sqrt(x), x),
        lambda x: torch.where(x > 0, torch.sqrt(x), x),
        (normal(3, 4),),
    )


def cast_cases() -> Iterator[Case]:
    def through(dtype: str) -> Callable[..., Any]:
        return lambda x: op.multiply(x, op.astype(op.astype(x, dtype), "float64"))

    x = normal(3, 4) * 3
    rule = "relax.astype"
    yield Case(rule, "float32", through("float32"), lambda x: x * x.float().double(), (x,))
    yield Case(rule, "int64", through("int64"), lambda x: x * x.long().double(), (x,))
    yield Case(
        rule,
        "to-float32-output",
        lambda x: op.astype(x, "float32"),
        lambda x: x.float(),
        (x,),
    )
    yield Case(
        rule,
        "from-float32",
        lambda x: op.astype(x, "float64"),
        lambda x: x.double(),
        (x.float(),),
    )
    yield Case(
        rule,
        "mask-and-number",
        lambda x, m, i: op.multiply(
            op.multiply(x, op.astype(m, "float64")), op.astype(i, "float64")
        ),
        lambda x, m, i: x * m.double() * i.double(),
        (x, mask(3, 4), integers(3, 4).int()),
    )


def constant_cases() -> Iterator[Case]:
    yield Case(
        "relax.grad.no_grad",
        "one-side",
        lambda x: op.multiply(x, op.grad.no_grad(x)),
        lambda x: x * x.detach(),
        (normal(3, 4),),
    )
    yield Case(
        "relax.grad.no_grad",
        "of-a-value",
        lambda x, y: op.add(op.grad.no_grad(op.multiply(x, y)), y),
        lambda x, y: (x * y).detach() + y,
        (normal(3, 4), normal(4)),
    )
    yield Case(
        "relax.full",
        "beside",
        lambda x: op.multiply(x, op.full((3, 4), const(2.0), "float64")),
        lambda x: x * torch.full((3, 4), 2.0, dtype=torch.float64),
        (normal(4),),
    )


def elementwise_cases() -> Iterator[Case]:
    """Yield all cases of this file."""
    yield from unary_cases()
    yield from binary_cases()
    yield from power_cases()
    yield from nan_cases()
    yield from where_cases()
    yield from cast_cases()
    yield from constant_cases()
