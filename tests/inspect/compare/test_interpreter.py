"""The interpreter of Relax operators against TVM's compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tvm import relax

from tests.relax_helpers import build_main, compile_and_run
from tvmbridge.inspect.compare.interpreter import RelaxRun
from tvmbridge.inspect.compare.operators import OPERATORS

op = relax.op
Formula = Callable[..., "relax.Expr | Sequence[relax.Expr]"]


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


UNARY = """
negative abs exp log sqrt rsqrt sin cos tan tanh sigmoid erf floor ceil trunc round sign square
zeros_like ones_like atan nn.relu nn.silu nn.gelu nn.gelu_tanh isnan isinf isfinite
"""

BINARY = """
add subtract multiply divide power maximum minimum less less_equal greater greater_equal equal
not_equal
"""


def resolve(name: str) -> Callable[..., relax.Expr]:
    found: object = op
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[return-value]


def elementwise(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
    unary = [resolve(name)(x) for name in UNARY.split()]
    return [
        *unary,
        *(resolve(name)(x, y) for name in BINARY.split()),
        op.where(op.less(x, y), x, y),
    ]


def moves(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
    return [
        op.reshape(x, (6, 4)),
        op.expand_dims(x, [1]),
        op.squeeze(op.expand_dims(x, [1]), [1]),
        op.permute_dims(x, [2, 0, 1]),
        op.permute_dims(x),
        op.concat([x, y], 1),
        op.stack([x, y], 1),
        op.strided_slice(x, [1, 2], [1, 0], [3, 4], [1, 2]),
        op.tile(x, (2, 1, 1)),
        op.flip(x, 1),
        op.triu(x, 1),
        op.tril(x, -1),
        op.broadcast_to(op.strided_slice(x, [0], [0], [1]), (5, 3, 4)),
        op.full((2, 3), relax.const(2.5, "float64"), "float64"),
        op.zeros((2,), "float64"),
        op.ones((2,), "float64"),
        op.astype(op.less(x, y), "float64"),
        relax.TupleGetItem(op.split(x, [1, 3], 2), 1),
        relax.TupleGetItem(op.split(x, 2, 2), 0),
    ]


def reductions(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
    found = [
        resolve(name)(x, axes, keepdims=keep)
        for name in ("sum", "mean", "variance", "max", "min", "prod")
        for axes, keep in ((None, False), ([1], True), ([-1, 0], False))
    ]
    return [
        *found,
        op.matmul(x, op.permute_dims(y, [0, 2, 1])),
        op.nn.softmax(x, 1),
        op.nn.log_softmax(x, -1),
        op.collapse_sum_to(x, (3, 1)),
        op.clip(x, 0.2, 0.5),
    ]


def norms(x: relax.Expr, gamma: relax.Expr) -> list[relax.Expr]:
    return [
        op.nn.layer_norm(x, gamma, gamma, [-1], 1e-3),
        op.nn.rms_norm(x, gamma, [-1], 1e-3),
    ]


def lookups(x: relax.Expr, indices: relax.Expr) -> list[relax.Expr]:
    rows = op.take(x, indices, axis=0)
    return [rows, op.take(x, indices, axis=1), op.grad.take_backward(rows, x, indices, axis=0)]


def logic(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
    left, right = op.less(x, y), op.less(x, relax.const(0.5, "float64"))
    return [
        *(getattr(op, f"logical_{name}")(left, right) for name in ("and", "or", "xor")),
        op.logical_not(left),
    ]


CASES: dict[str, tuple[Formula, list[torch.Tensor]]] = {
    "elementwise": (elementwise, [positive(3, 4), positive(3, 4)]),
    "moves": (moves, [positive(2, 3, 4), positive(2, 3, 4)]),
    "reductions": (reductions, [positive(2, 3, 4), positive(2, 3, 4)]),
    "norms": (norms, [positive(5, 6), positive(6)]),
    "lookups": (lookups, [positive(4, 5), torch.tensor([0, 3, 3])]),
    "logic": (logic, [positive(3, 4), positive(3, 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_means_what_is_compiled(name: str) -> None:
    formula, inputs = CASES[name]
    mod = build_main(inputs, formula)
    interpreted = RelaxRun(mod["main"], inputs).results
    compiled = compile_and_run(mod, *inputs)
    for mine, theirs in zip(interpreted, compiled, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_an_operator_that_is_not_in_the_table_is_compiled_alone() -> None:
    assert "relax.nn.leakyrelu" not in OPERATORS
    x = positive(3, 4) - 0.5
    mod = build_main([x], lambda x: op.nn.leakyrelu(x, 0.25))
    run = RelaxRun(mod["main"], [x])
    (value,) = run.results
    torch.testing.assert_close(value, torch.nn.functional.leaky_relu(x, 0.25))
    assert [s.operator for s in run.trace.steps] == ["", "relax.nn.leakyrelu"]
