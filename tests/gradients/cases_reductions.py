"""Cases of the rules of reductions, softmax and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tvm import relax

from tests.gradients.cases import INF, NAN, Case, integers, normal

op = relax.op

_AXES: dict[str, Any] = {
    "all": None,
    "first": [0],
    "middle": [1],
    "last": [-1],
    "outer": [0, 2],
    "two-negative": [-1, -2],
    "listed": [0, 1, 2],
}

_REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (op.sum, torch.sum),
    "mean": (op.mean, torch.mean),
    "max": (op.max, torch.amax),
    "min": (op.min, torch.amin),
}


def reduction_cases() -> Iterator[Case]:
    for name, (f, g) in _REDUCTIONS.items():
        rule = f"relax.{name}"
        for form, axes in _AXES.items():
            dims = (0, 1, 2) if axes is None else axes
            for keepdims in (False, True) if form in ("all", "middle") else (False,):
                formulas = (
                    lambda x, f=f, a=axes, k=keepdims: f(x, a, k),
                    lambda x, g=g, d=dims, k=keepdims: g(x, d, keepdim=k),
                )
                kind = f"{form}-{'kept' if keepdims else 'dropped'}"
                x = normal(2, 3, 4) if name in ("sum", "mean") else integers(2, 3, 4)
                yield Case(rule, kind, *formulas, (x,))
        yield Case(rule, "0-d", lambda x, f=f: f(x, None), lambda x, g=g: g(x, ()), (normal(),))
        yield Case(rule, "1-d", lambda x, f=f: f(x, [0]), lambda x, g=g: g(x, (0,)), (normal(5),))
        yield Case(
            rule,
            "extent-one",
            lambda x, f=f: f(x, [1]),
            lambda x, g=g: g(x, (1,)),
            (normal(3, 1, 4),),
        )
        yield Case(
            rule,
            "not-finite",
            lambda x, f=f: f(x, [1]),
            lambda x, g=g: g(x, (1,)),
            (torch.tensor([[1.0, NAN, 2.0], [INF, 0.0, INF], [-INF, -INF, 1.0]]).double(),),
        )


def softmax_cases() -> Iterator[Case]:
    for rule, f, g in (
        ("relax.nn.softmax", op.nn.softmax, torch.softmax),
        ("relax.nn.log_softmax", op.nn.log_softmax, torch.log_softmax),
    ):
        for axis in (0, 1, -1):
            yield Case(
                rule,
                f"axis-{axis}",
                lambda x, f=f, a=axis: f(x, a),
                lambda x, g=g, a=axis: g(x, a),
                (normal(2, 3, 4),),
            )
        formulas = (lambda x, f=f: f(x, -1), lambda x, g=g: g(x, -1))
        masked = normal(3, 5).masked_fill(torch.eye(3, 5, dtype=torch.bool), -INF)
        yield Case(rule, "masked", *formulas, (masked,))
        yield Case(rule, "large", *formulas, (normal(3, 5) * 1e4,))
        yield Case(rule, "1-d", *formulas, (normal(5),))
        yield Case(rule, "extent-one", *formulas, (normal(3, 1),))
        yield Case(rule, "ties", *formulas, (integers(3, 5),))


def product_cases() -> Iterator[Case]:
    rule = "relax.matmul"
    for name, left, right in (
        ("matrices", (3, 4), (4, 5)),
        ("batch", (2, 3, 4), (2, 4, 5)),
        ("two-batches", (2, 3, 4, 5), (2, 3, 5, 2)),
        ("row-column", (1, 4), (4, 1)),
        ("column-row", (4, 1), (1, 4)),
        ("one", (1, 1), (1, 1)),
        ("batch-of-one", (1, 3, 4), (1, 4, 2)),
        ("broadcast-batch", (2, 3, 4), (4, 5)),
        ("broadcast-left", (3, 4), (2, 4, 5)),
        ("broadcast-one", (1, 3, 4), (2, 4, 5)),
        ("broadcast-both", (2, 1, 3, 4), (1, 5, 4, 2)),
        ("vectors", (4,), (4,)),
        ("vector-matrix", (4,), (4, 5)),
        ("matrix-vector", (3, 4), (4,)),
        ("batch-vector", (2, 3, 4), (4,)),
        ("vector-batch", (4,), (2, 4, 5)),
    ):
        yield Case(rule, name, op.matmul, torch.matmul, (normal(*left), normal(*right, seed=1)))
    x = normal(4, 4)
    yield Case(rule, "itself", lambda x: op.matmul(x, x), lambda x: x @ x, (x,))
    yield Case(
        rule,
        "its-transpose",
        lambda x: op.matmul(x, op.permute_dims(x, [1, 0])),
        lambda x: x @ x.t(),
        (normal(3, 4),),
    )
    yield Case(
        rule,
        "both-transposed",
        lambda x, y: op.matmul(op.permute_dims(x, [0, 2, 1]), op.permute_dims(y, [0, 2, 1])),
        lambda x, y: x.transpose(1, 2) @ y.transpose(1, 2),
        (normal(2, 4, 3), normal(2, 5, 4)),
    )
    yield Case(
        rule,
        "heads",
        lambda x, y: op.matmul(_heads(x, [0, 2, 1, 3]), _heads(y, [0, 2, 3, 1])),
        lambda x, y: (
            x.view(2, 5, 3, 4).permute(0, 2, 1, 3) @ y.view(2, 5, 3, 4).permute(0, 2, 3, 1)
        ),
        (normal(2, 5, 12), normal(2, 5, 12, seed=1)),
    )


def _heads(x: relax.Expr, axes: list[int]) -> relax.Expr:
    return op.permute_dims(op.reshape(x, (2, 5, 3, 4)), axes)


def reduction_and_product_cases() -> Iterator[Case]:
    """Yield all cases of this file."""
    yield from reduction_cases()
    yield from softmax_cases()
    yield from product_cases()
