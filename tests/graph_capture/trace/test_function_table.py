"""The table of handlers: which handlers a function has, in which order, and what they call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import tvmbridge.graph_capture.trace.functions  # noqa: F401  (enters all handlers)
from tvmbridge.graph_capture.trace import empties, fills, promotion, rephrased
from tvmbridge.graph_capture.trace.function_table import HANDLERS, Call, FunctionTable, replaces

# All functions with several handlers, in the order in which these are called.
SEVERAL = {
    torch.Tensor.__setitem__: [rephrased._asked, fills._written],
    functional.huber_loss: [empties._mean_of_empty, promotion._promoted],
}


def test_the_order_of_several_handlers_for_one_function() -> None:
    found = {f: [c[order] for order in sorted(c)] for f, c in HANDLERS.items() if len(c) > 1}
    assert found == SEVERAL


@pytest.fixture
def _own_handlers() -> Iterator[None]:
    before = {function: dict(chain) for function, chain in HANDLERS.items()}
    yield
    HANDLERS.clear()
    HANDLERS.update(before)


@pytest.mark.usefixtures("_own_handlers")
def test_a_call_goes_from_handler_to_handler_to_the_function() -> None:
    def noting(name: str) -> Any:
        def handler(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append((name, call.function, kwargs))
            return call(*args, **{**kwargs, "keepdim": True}) + 1

        return handler

    seen: list[Any] = []
    replaces(torch.logsumexp, order=1)(noting("second"))
    replaces(torch.logsumexp)(noting("first"))
    with pytest.raises(ValueError, match="two handlers of order 1"):
        replaces(torch.logsumexp, order=1)(noting("third"))
    x = torch.randn(2, 3)
    with FunctionTable():
        result = torch.logsumexp(x, 1)
    assert torch.equal(result, torch.logsumexp(x, 1, keepdim=True) + 2)
    assert seen == [
        ("first", torch.logsumexp, {}),
        ("second", torch.logsumexp, {"keepdim": True}),
    ]


@pytest.mark.usefixtures("_own_handlers")
def test_what_a_handler_calls_is_not_handled_again() -> None:
    @replaces(torch.sinh, torch.cosh)
    def _other(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.sinh(*args) if call.function is torch.cosh else torch.cosh(*args)

    x = torch.randn(3)
    with FunctionTable():
        found = torch.sinh(x), torch.cosh(x)
    assert torch.equal(found[0], x.cosh())
    assert torch.equal(found[1], x.sinh())
