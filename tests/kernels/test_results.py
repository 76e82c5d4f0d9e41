"""Operators whose results differ from their fake kernels' are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report
from tvmbridge.kernels.results import own, promises_of, taker_of

Tensor = torch.Tensor
X = torch.linspace(-1, 2, 12).reshape(3, 4)
ONE, PAIR, MANY = (f"(Tensor x) -> {r}" for r in ("Tensor", "(Tensor, Tensor)", "Tensor[]"))
TWO = "(Tensor g, Tensor x) -> Tensor"


def operator(
    name: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None, schema: str = ONE
) -> Any:
    """Register and return an operator ``checked::name``."""
    defined = torch.library.custom_op(f"checked::{name}", kernel, mutates_args=(), schema=schema)
    if fake is not None:
        defined.register_fake(fake)
    return defined


LIARS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], str]] = {
    "count": (
        MANY,
        lambda x: [x * 1, x * 2, x * 3],
        lambda x: [torch.empty_like(x), torch.empty_like(x)],
        "returned 3 results, where 2",
    ),
    "write": (ONE, lambda x: x.add_(1) * 2, torch.empty_like, "wrote into an argument"),
    "draw": (
        ONE,
        lambda x: x + torch.rand_like(x) + numpy.random.rand(),
        torch.empty_like,
        "draws from torch, numpy.random",
    ),
    "number": ("(Tensor x) -> int", lambda x: int(x.sum()), lambda x: 3, "returns a number"),
}
OPERATORS = {
    name: operator(name, kernel, fake, schema) for name, (schema, kernel, fake, _) in LIARS.items()
}


class Calls(nn.Module):
    """A module that calls an operator, sums its results, and multiplies by a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        # A lambda, because an operator's kernel registrations cannot be deep-copied.
        self.function = lambda x: function(x)
        self.weight = nn.Parameter(X.flip(0) / 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(x)
        return (sum(found) if isinstance(found, list | tuple) else found) * self.weight


@pytest.mark.parametrize("name", LIARS)
def test_operators_that_break_their_word_are_refused_by_name(name: str) -> None:
    message = LIARS[name][-1]
    module = Calls(OPERATORS[name]).eval()
    states = torch.get_rng_state(), repr(numpy.random.get_state()), random.getstate()
    with torch.no_grad(), pytest.raises(BridgeError, match=message) as caught:
        add_tvm_dispatch(module, X.clone())
    assert f"checked.{name}.default" in str(caught.value)
    after = torch.get_rng_state(), repr(numpy.random.get_state()), random.getstate()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert "forward" not in module.__dict__


def test_a_lie_that_is_told_later_is_raised_at_its_call() -> None:
    module = Calls(operator("later", lambda x: x[x > -9].reshape(-1, 4) * 2, torch.empty_like))
    with torch.no_grad():
        add_tvm_dispatch(module.eval(), X)
        expected = X * 2 * module.weight
        torch.testing.assert_close(module(X), expected)
        with pytest.raises(BridgeError, match=r"checked.later.default returned float32\[2, 4\]"):
            module(X - torch.tensor([[10.0], [0.0], [0.0]]))
        torch.testing.assert_close(module(X), expected)
    assert dispatch_report(module).tvm_calls == 2


def _with_backward(name: str, kernel: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return a sine operator whose gradient is an operator with ``kernel(cotangent, operand)``."""
    backward = operator(f"{name}_backward", kernel, lambda g, x: torch.empty_like(x), TWO)
    forward = operator(name, torch.sin, torch.empty_like)
    forward.register_autograd(
        lambda ctx, g: backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return forward


def test_gradients_are_checked_too() -> None:
    def right(g: Tensor, x: Tensor) -> Tensor:
        return g * x.cos()

    def lying(g: Tensor, x: Tensor) -> Tensor:
        return (g * x.cos()).double()

    module, eager = (Calls(_with_backward(f"sine{i}", right)).train() for i in range(2))
    add_tvm_dispatch(module, X.clone().requires_grad_())
    gradients = []
    for each in (module, eager):
        x = X.clone().requires_grad_()
        each(x).square().sum().backward()
        gradients.append([x.grad, each.weight.grad])
    torch.testing.assert_close(*gradients)
    assert dispatch_report(module).tvm_calls == 1
    with pytest.raises(BridgeError, match=r"checked.sine2_backward.default returned float64\[3"):
        add_tvm_dispatch(Calls(_with_backward("sine2", lying)), X.clone().requires_grad_())


def test_what_cannot_be_traced_is_refused_by_name() -> None:
    nameless = operator("nameless", lambda x: x * 2, None)
    with pytest.raises(BridgeError, match=r"no fake impl registered for.*checked::nameless"):
        add_tvm_dispatch(Calls(nameless).eval().requires_grad_(False), X)
    writes = torch.library.custom_op(
        "checked::writes", lambda x: None, mutates_args=("x",), schema="(Tensor(a!) x) -> ()"
    )
    module = Calls(lambda x: writes(y := x * 1) or y).eval().requires_grad_(False)
    with pytest.raises(BridgeError, match=r"checked\.writes\.default"):
        add_tvm_dispatch(module, X)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (X[:2] * 2, r"returned float32\[2, 4\] as result 0, where float32\[3, 4\]"),
        (X.sum(1), r"returned float32\[3\]"),
        (X.double(), r"returned float64\[3, 4\]"),
        (X.mT.contiguous().mT, r"returned strides \[1, 3\] for result 0"),
        (None, "returned NoneType, which is no tensor"),
        (X.to("meta"), "returned Tensor, which is no tensor in the memory of its operands"),
    ],
)
def test_each_result_is_what_was_declared(result: Any, found: str) -> None:
    declared = {"declared": [[[3, 4], "float32"]], "promises": promises_of([X], X)}
    take = taker_of({"op": "somebody.s", "results": None, **declared})
    assert torch.equal(take(X, ()), X)
    with pytest.raises(BridgeError, match=rf"somebody\.s {found}"):
        take(result, ())


def test_strides_that_may_follow_an_operand_are_not_promised() -> None:
    assert promises_of([X.mT], X.mT) == [None]
    assert promises_of([X], [X.mT, X[:1], None]) == [[1, 4], [0, 1], None]


def test_results_are_dense_tensors_of_their_own() -> None:
    take = taker_of({"op": "x", "results": None, "declared": [[[4, 3], "float32"]]})
    for result in (X.mT, X.reshape(4, 3), torch._neg_view(X.clone().reshape(4, 3))):  # type: ignore[attr-defined]
        taken = take(result, (X,))
        assert torch.equal(taken, result)
        assert taken.is_contiguous()
        assert not taken.is_neg()
        assert taken.data_ptr() != X.data_ptr()


def test_zeros_without_memory_get_some() -> None:
    zeros = torch._efficientzerotensor((2, 3))
    found = own(zeros, ())
    assert not found._is_zerotensor()
    torch.testing.assert_close(found, torch.zeros(2, 3))
    torch.from_dlpack(found)
