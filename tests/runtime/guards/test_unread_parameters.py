"""Arguments that forward does not read are not part of a signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.dispatch_helpers import sample
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.guards.spelling import Parameters


def unread(forward: Callable[..., Any]) -> frozenset[str]:
    parameters = Parameters.of(forward)
    assert parameters is not None
    return parameters.unread


def test_which_parameters_are_read() -> None:
    def none(x: Any, a: Any, *b: Any, **c: Any) -> Any:
        return x

    def inner(x: Any, a: Any, b: Any) -> Any:
        return [x for _ in range(3) if a] or (lambda: b)

    def by_name(x: Any, a: Any) -> Any:
        return locals()["a"]

    def only_assigned(x: Any, a: Any) -> Any:
        a = x
        del a

    assert unread(none) == {"a", "b", "c"}
    assert unread(inner) == unread(by_name) == unread(only_assigned) == frozenset()


def test_a_signature_that_is_only_said_is_not_bound_to() -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    forward.__signature__ = inspect.signature(lambda x, scale=1.0: None)  # type: ignore[attr-defined]
    assert Parameters.of(forward) is None
    assert Parameters.of(functools.partial(forward, 1)) is None


class Ignores(nn.Module):
    """Accepts further arguments, as from a training loop, and reads none of them."""

    def forward(self, x: torch.Tensor, step: int, **more: Any) -> torch.Tensor:
        return torch.tanh(x)


def test_arguments_that_forward_does_not_read_are_no_structure() -> None:
    module = add_tvm_dispatch(Ignores().eval(), (sample(), 0), sample_kwargs={"items": 3})
    for step in range(4):
        calls: list[dict[str, Any]] = [{"items": step}, {"items": "a", "extra": object()}]
        for more in calls:
            torch.testing.assert_close(module(sample(), step, **more), torch.tanh(sample()))
    # Train mode needs code of its own, but one signature serves all values of unread arguments.
    module.train()
    for step in (object(), torch.ones(3), 2):
        x = sample().requires_grad_()
        out = module(x, step, items=torch.ones(2, requires_grad=True))
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, 1 - torch.tanh(sample()).square())
    assert (dispatch_report(module).tvm_calls, dispatch_report(module).fallbacks) == (11, {})
