"""Higher-order operators in compiled code: eager PyTorch's values and gradients, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report

Function = Callable[..., Any]


class Model(nn.Module):
    """Two layers and a buffer, which ``function`` of the model and the input may read."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("offset", torch.randn(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x * 2)


def _cond(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(
        x.sum() > 0, lambda z: model.a(z).relu(), lambda z: z.tanh() + model.offset, (x,)
    )


def _cond_of_two(model: Model, x: torch.Tensor) -> Any:
    def first(z: torch.Tensor, w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return z.softmax(-1), (w["w"] * z).sum()

    def second(z: torch.Tensor, w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model.b(z), w["w"].sin().sum()

    one, two = torch.cond(x[0, 0] < x[1, 1], first, second, (x, {"w": x.exp()}))
    return one * two, two


def _nested(model: Model, x: torch.Tensor) -> torch.Tensor:
    def inner(z: torch.Tensor) -> torch.Tensor:
        return torch.cond(z.max() > 1, lambda y: model.a(y), lambda y: y - model.offset, (z,))

    return torch.cond(x.sum() > 0, inner, lambda z: z.cos(), (x,)).sin()


def _detached(model: Model, x: torch.Tensor) -> torch.Tensor:
    def first(z: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = z.exp().sum()
        return z * scale * z.detach()

    return torch.cond(x.sum() > 0, first, lambda z: z * 3, (x,))


def _by_shape(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.shape[0] > 2, lambda z: model.a(z), lambda z: z.cos(), (x,))


def _transposed(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda z: z.t().reshape(-1) * 2, lambda z: z.sum(1).repeat(4), (x.t(),))


def _while(model: Model, x: torch.Tensor) -> Any:
    def going_on(i: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (i < 3) & (z.abs().sum() < 100)

    def step(i: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.sin(model.a(z)) * 2

    return while_loop(going_on, step, (torch.zeros((), dtype=torch.int64), x))


def _scan(model: Model, x: torch.Tensor) -> Any:
    def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        following = torch.tanh(model.a(carry) + row)
        return following, following * model.offset

    return scan(step, torch.zeros_like(x[0]), x)


def _map(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda row, w: (row * w).softmax(0) + model.offset, x, model.offset * 2)


CASES: dict[str, Function] = {
    "cond": _cond,
    "cond, two results": _cond_of_two,
    "cond in cond": _nested,
    "cond without gradients in a branch": _detached,
    "cond by a shape": _by_shape,
    "cond of a transposed tensor": _transposed,
    "while_loop": _while,
    "scan": _scan,
    "map": _map,
}
# Eager PyTorch does not differentiate the others (or asks for Dynamo's graph of the backward).
TRAINED = [name for name in CASES]


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.rand(4, 4, dtype=dtype)
    return [x, -x, x.flip(0) - 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_forward_is_eager_pytorchs(case: str, dtype: torch.dtype) -> None:
    model = Model(CASES[case]).to(dtype).eval()
    eager = copy.deepcopy(model)
    with torch.no_grad():
        add_tvm_dispatch(model, _inputs(dtype)[0])
        for x in _inputs(dtype):
            torch.testing.assert_close(model(x), eager(x))
    assert dispatch_report(model).fallbacks == {}


@pytest.mark.parametrize("case", TRAINED)
def test_gradients_are_eager_pytorchs(case: str) -> None:
    model = Model(CASES[case]).double().train()
    eager = copy.deepcopy(model)
    add_tvm_dispatch(model, _inputs(torch.float64)[0].requires_grad_())
    for x in _inputs(torch.float64):
        for each, other in ((model, eager),):
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            _loss(each(mine)).backward()
            _loss(other(theirs)).backward()
            torch.testing.assert_close(mine.grad, theirs.grad)
    for ours, of_eager in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, of_eager.grad)
    assert dispatch_report(model).fallbacks == {}


def _loss(results: Any) -> torch.Tensor:
    several = results if isinstance(results, tuple) else (results,)
    return sum((r.double() ** 2).sum() for r in several if r.is_floating_point())
