"""Custom autograd functions: backward is called, and gets zeros, exactly when eager does so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cotangent_helpers import SAMPLE, Trunk, assert_same, custom, dispatched, gradients
from tests.thinned import thinned
from tvmbridge import BridgeError, dispatch_report


def test_a_backward_that_adds_is_called_or_not_as_in_eager() -> None:
    module = Trunk(custom(lambda g, x: g + x.sign()))
    ours = dispatched(module)
    for used in ([0, 1, 2], [2], [0], [0, 2]):
        assert_same(gradients(ours, used), gradients(module, used))


def several(
    backward: Callable[..., torch.Tensor], *, zeros: bool = True, told: str = "method"
) -> type:
    """Return a custom function with two outputs; ``backward`` gets its input and the cotangents.

    With ``told="method"`` the function sets ``materialize_grads`` by the method, otherwise by the
    attribute.
    """

    class Several(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            if told == "method":
                ctx.set_materialize_grads(zeros)
            else:
                ctx.materialize_grads = zeros
            ctx.save_for_backward(x)
            return x * 2, x.sqrt()

        @staticmethod
        def backward(ctx, *gradients):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
            return backward(ctx.saved_tensors[0], *gradients)

    return Several


class Pair(nn.Module):
    """A module with three outputs: ``behind`` of a custom function's two outputs, and a sum."""

    def __init__(self, function: type, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.behind = behind
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.function.apply(self.scale * x)  # type: ignore[attr-defined]
        return self.behind(first), self.behind(second), self.scale.sum()


def no_change(x: torch.Tensor) -> torch.Tensor:
    return x


ROWS = SAMPLE.abs()[:2]
SEVERAL: dict[str, Callable[..., torch.Tensor]] = {
    "infinite": lambda x, a, b: a * 2 + b / (2 * x.sqrt()),
    "nan is hidden": lambda x, a, b: torch.nan_to_num(a * 2 + b / (2 * x.sqrt()), nan=7.0),
    "zeros are asked for": lambda x, a, b: a * 2 + (b == 0).to(a.dtype),
}


BEHIND = {"infinite": torch.exp, "nan is hidden": no_change, "zeros are asked for": torch.exp}


@pytest.mark.parametrize("kind", thinned(SEVERAL, 3))
def test_functions_get_zeros_for_outputs_that_are_not_used(kind: str) -> None:
    module = Pair(several(SEVERAL[kind]), BEHIND[kind])
    ours = dispatched(module, x=ROWS)
    for used in ([0], [0, 2], [1], [2]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    assert dispatch_report(ours).fallbacks == {}


class Chain(nn.Module):
    """A chain of custom functions, of which some get no gradient for some outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = several(lambda x, a, b: torch.nan_to_num(a + b / (x * 0), nan=3.0))
        self.second = custom(lambda g, x: torch.nan_to_num(g / (x * 0), nan=5.0) + x)
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.first.apply(self.scale * x)  # type: ignore[attr-defined]
        third, _ = self.first.apply(self.second.apply(first) + 1)  # type: ignore[attr-defined]
        return third.exp(), first.sum() + second.sin().sum(), second * x, self.scale.sum()


def test_functions_behind_functions_are_called_or_not_as_in_eager() -> None:
    module = Chain()
    ours = dispatched(module, x=ROWS)
    for used in ([0], [1], [2, 3], [0, 1, 2, 3]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    assert dispatch_report(ours).fallbacks == {}


def test_a_function_that_gets_no_gradient_at_all() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            return None

    class Stopped(Chain):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            stopped = Stops.apply(self.second.apply(self.scale * x))  # type: ignore[attr-defined,no-untyped-call]
            return stopped * self.scale, self.scale.sum()

    module = Stopped()
    ours = dispatched(module, x=ROWS)
    for used in ([0, 1], [0]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    with pytest.raises(BridgeError, match="Custom gets no gradient even where all"):
        gradients(ours, [1], ROWS)


class Checkpointed(nn.Module):
    """A checkpoint with several results, each with its own parameter."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = checkpoint(self.part, x, use_reentrant=self.reentrant)  # type: ignore[misc]
        return first * 2, second.exp(), third["also"] + first.detach()

    def part(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x * self.scale, (x * self.other).sqrt(), {"also": (x * self.scale).sin()}


@pytest.mark.parametrize("reentrant", thinned([False, True], 2))
def test_checkpoints_with_several_results(reentrant: bool) -> None:
    module = Checkpointed(reentrant=reentrant)
    ours = dispatched(module, x=ROWS)
    found = [[o.requires_grad for o in m(ROWS.clone().requires_grad_())] for m in (ours, module)]
    assert found[0] == found[1] == [True, True, not reentrant]
    for used in ([0], [1], [0, 1]) if reentrant else ([0], [1], [2], [0, 2]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    assert dispatch_report(ours).fallbacks == {}


@pytest.mark.parametrize("told", ["method", "attribute"])
def test_what_functions_get_where_that_is_not_zeros_is_refused_by_name(told: str) -> None:
    def by_presence(x: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> Any:
        return 2 * a if b is None else 5 * b if a is None else a * b

    module = Pair(several(by_presence, zeros=False, told=told), no_change)
    ours = dispatched(module, x=ROWS)
    for used in ([0, 1], [0, 1, 2], [2]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    with pytest.raises(BridgeError, match="Several gets None for an output"):
        gradients(ours, [0], ROWS)
