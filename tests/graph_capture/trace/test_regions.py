"""Higher-order operators agree with eager PyTorch in values and gradients, or are refused."""

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
from tvmbridge.graph_capture.trace.region_ops import REGIONS

Function = Callable[..., Any]


class Model(nn.Module):
    """Two layers and a buffer, which ``function(model, x)`` may use."""

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
    return torch.cond(
        x.sum() > 0, lambda z: z.t().reshape(-1) * 2, lambda z: z.sum(1).repeat(4), (x.t(),)
    )


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


def _scan_in_steps(model: Model, x: torch.Tensor) -> Any:
    carry, rows = torch.zeros_like(x[0]), []
    for row in x:
        carry = torch.tanh(model.a(carry) + row)
        rows.append(carry * model.offset)
    return carry, torch.stack(rows)


def _map(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda row, w: (row * w).softmax(0) + model.offset, x, model.offset * 2)


_BARE = "cond without gradients in a branch"
CASES: dict[str, Function] = {
    "cond": _cond,
    "cond, two results": _cond_of_two,
    "cond in cond": _nested,
    _BARE: _detached,
    "cond by a shape": _by_shape,
    "cond of a transposed tensor": _transposed,
    "while_loop": _while,
    "scan": _scan,
    "map": _map,
}


def _heads(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = model.a(x)[None, :, None].expand(1, 4, 2, 4).transpose(1, 2)
    return query, query.cos(), query * 2


def _scored(model: Model, x: torch.Tensor) -> torch.Tensor:
    def score(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return score * model.b.weight[row, column] - (row - column) * model.offset[head]

    return flex_attention(*_heads(model, x), score_mod=score)


def _masked(model: Model, x: torch.Tensor) -> torch.Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
    return flex_attention(*_heads(model, x), block_mask=mask)


FLEX: dict[str, Function] = {
    "flex_attention": lambda model, x: flex_attention(*_heads(model, x)),
    "flex_attention, scored": _scored,
    "flex_attention, masked": _masked,
}


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.rand(4, 4, dtype=dtype)
    return [x, -x, x.flip(0) - 0.5]


def _marked(*shortest: str) -> list[Any]:
    """Return all cases, with the mark ``slow`` except for ``shortest``."""
    return [
        pytest.param(case, marks=[] if case in shortest else pytest.mark.slow)
        for case in (*CASES, *FLEX)
    ]


@pytest.mark.parametrize("case", _marked("cond", "while_loop", "map"))
def test_forward_is_eager_pytorchs(case: str) -> None:
    dtype = torch.float64 if len(case) % 2 else torch.float32
    model = Model({**CASES, **FLEX}[case]).to(dtype).eval()
    eager = copy.deepcopy(model)
    with torch.no_grad():
        add_tvm_dispatch(model, _inputs(dtype)[0])
        for x in _inputs(dtype):
            torch.testing.assert_close(model(x), eager(x))
    assert dispatch_report(model).fallbacks == {}


@pytest.mark.parametrize(
    "case",
    # On the CPU eager PyTorch does not differentiate flex_attention.
    [p for p in _marked("scan", _BARE) if p.values[0] in CASES],
)
def test_gradients_are_eager_pytorchs(case: str) -> None:
    model = Model(CASES[case]).double().train()
    eager = copy.deepcopy(model)
    if case == "scan":  # whose own gradient PyTorch 2.11 computes wrongly
        eager.function = _scan_in_steps
    add_tvm_dispatch(model, _inputs(torch.float64)[0].requires_grad_())
    for x in _inputs(torch.float64):
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        _loss(model(mine)).backward()
        _loss(eager(theirs)).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    for ours, of_eager in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, of_eager.grad)
    assert dispatch_report(model).fallbacks == {}


def _loss(results: Any) -> torch.Tensor:
    several = results if isinstance(results, tuple) else (results,)
    return sum((r.double() ** 2).sum() for r in several if r.is_floating_point())


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 7


REFUSED: dict[str, tuple[Function, str]] = {
    "a draw": (lambda m, z: functional.dropout(z), "draws random numbers"),
    "an operand": (lambda m, z: z.view(-1).view(4, 4), "returns an operand"),
    "a buffer": (lambda m, z: m.offset.add_(1) + z, "writes into a tensor from outside"),
    "a custom function": (lambda m, z: _Squared.apply(z), "custom autograd function _Squared"),
    "other strides": (lambda m, z: (z * 2).t(), "other shapes, strides or dtypes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_region_would_not_repeat_is_refused_by_name(case: str) -> None:
    function, reason = REFUSED[case]

    def branching(model: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda z: function(model, z), lambda z: z * 3, (x,))

    sample = torch.rand(4, 4).requires_grad_(case != "a buffer")
    with torch.set_grad_enabled(case != "a buffer"), pytest.raises(BridgeError, match=reason):
        add_tvm_dispatch(Model(branching).eval(), sample)


def test_other_strides_of_an_operand_give_the_same_numbers() -> None:
    model = Model(_transposed).eval()
    eager, x = copy.deepcopy(model), torch.rand(4, 4)
    with torch.no_grad():
        add_tvm_dispatch(model, x)
        torch.testing.assert_close(model(x.t()), eager(x.t()))


def test_other_sizes_run_as_in_eager_pytorch() -> None:
    model = add_tvm_dispatch(Model(_cond).eval())
    eager = Model(_cond)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        for rows in (4, 2, 3, 5):
            x = torch.rand(rows, 4) - 0.4
            torch.testing.assert_close(model(x), eager.eval()(x))


def test_through_torch_compile() -> None:
    model = Model(_cond).eval()
    compiled = torch.compile(model, backend="tvmbridge")
    with torch.no_grad():
        for x in _inputs(torch.float32):
            torch.testing.assert_close(compiled(x), model(x))


def test_a_region_is_known_by_all_that_it_computes() -> None:
    """Regions that differ in a constant have different keys: cached code calls them by key."""
    known = set(REGIONS)
    for scale in (2.0, 3.0):

        def function(model: Model, x: torch.Tensor, factor: float = scale) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda z: z * factor, lambda z: z.sin(), (x,))

        model = Model(function).eval()
        with torch.no_grad():
            x = torch.rand(4, 4)
            torch.testing.assert_close(add_tvm_dispatch(model, x)(x), x * 2 * scale)
    assert len(set(REGIONS) - known) == 2
