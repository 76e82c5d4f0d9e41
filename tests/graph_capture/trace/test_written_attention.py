"""Attention written as products: replaced where the pattern holds, and equal to eager PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.trace import written_attention as written

SDPA = functional.scaled_dot_product_attention
BATCH, HEADS, TOKENS, SIZE = 2, 3, 5, 8
Form = Callable[..., Any]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the CPU count as a GPU for float64; return the dropout rates of the fused calls."""
    fused: list[float] = []

    def attention(q: Any, k: Any, v: Any, mask: Any, p: float, *, scale: float) -> torch.Tensor:
        fused.append(p)
        return SDPA(q, k, v, mask, 0.0, scale=scale)

    monkeypatch.setattr(written, "_HALVES", (torch.float64,))
    monkeypatch.setattr(written, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(written, "fused_kernel", lambda *args, **kwargs: "efficient")
    monkeypatch.setattr(written, "attention_on_gpus", attention)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return fused


class Forward(nn.Module):
    """Calls a function with query, key, value and mask."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.form(*tensors)


def _inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    heads = torch.randn(3, BATCH, HEADS, TOKENS, SIZE, dtype=torch.float64).unbind()
    mask = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64)
    return *heads, mask.masked_fill(torch.rand(mask.shape) < 0.3, torch.finfo(mask.dtype).min)


def plain(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def scaled_and_masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.matmul(q, k.mT) / math.sqrt(SIZE) * 2
    return torch.matmul(torch.softmax(mask + scores, dim=3), v)


def in_place(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = q @ k.transpose(-2, -1)
    scores *= 0.25
    scores += mask
    scores += mask[:, :, :1]
    weights = functional.softmax(scores.float(), dim=-1, dtype=torch.float32).type_as(q)
    return functional.dropout(weights, 0.5, training=False) @ v


def filled(q: Any, k: Any, v: Any, mask: Any) -> Any:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(causal, -math.inf).softmax(-1) @ v


def without_heads(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (t.reshape(BATCH * HEADS, TOKENS, SIZE) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(BATCH, HEADS, TOKENS, TOKENS) + mask
    weights = functional.softmax(scores.view(BATCH * HEADS, TOKENS, TOKENS), dim=-1)
    return torch.bmm(weights, v)


def batch_alone(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return torch.bmm(torch.bmm(q[:, 0], k[:, 0].mT).softmax(2), v[:, 0])


def changed_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Two layers: the second one writes into the mask of the first."""
    mask = mask.clone()
    first = (q @ k.mT + mask).softmax(-1) @ v
    mask[..., 0] = -2.0
    return (first @ k.mT + mask).softmax(-1) @ v


FUSED = (plain, scaled_and_masked, in_place, filled, without_heads, batch_alone, changed_mask)


@pytest.mark.parametrize("form", FUSED)
def test_the_pattern_is_one_call(form: Form, calls: list[float]) -> None:
    inputs = _inputs()
    with written.written_attention_fused(module := Forward(form)):
        found = module(*inputs)
    assert calls == [0.0] * (2 if form is changed_mask else 1)
    expected = module(*inputs)
    tolerance = 1e-6 if form is in_place else 1e-12  # its softmax is in float32
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.stride() == expected.stride()


def other_dimension(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (q @ k.mT).softmax(-2) @ v


def changed_weights(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return ((q @ k.mT).softmax(-1) * 2) @ v


def written_weights(q: Any, k: Any, v: Any, mask: Any) -> Any:
    weights = (q @ k.mT).softmax(-1)
    weights[:, :, 0] = 0
    return weights @ v


def written_query(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q = q.clone()
    scores = q @ k.mT
    q.zero_()
    return scores.softmax(-1) @ v


def scaled_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return ((q @ k.mT + mask.clamp(min=-9)) * 0.5).softmax(-1) @ v


def small_fill(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (q @ k.mT).masked_fill(mask < 0, -5.0).softmax(-1) @ v


def more_rows(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (q[:1] @ k[:1].mT + mask).softmax(-1) @ v


def by_name(q: Any, k: Any, v: Any, mask: Any) -> Any:
    weights = torch.softmax(input=torch.matmul(input=q, other=k.mT), dim=-1)
    return torch.matmul(functional.dropout(input=weights, p=0.0), v)


def mapped(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (t.expand(2, *t.shape) for t in (q, k, v))
    return torch.vmap(lambda *heads: plain(*heads, mask))(q, k, v)


OTHERS = (
    by_name,
    mapped,
    other_dimension,
    changed_weights,
    written_weights,
    written_query,
    scaled_mask,
    small_fill,
    more_rows,
)


@pytest.mark.parametrize("form", OTHERS)
def test_other_computations_stay(form: Form, calls: list[float]) -> None:
    inputs = _inputs()
    with written.written_attention_fused(module := Forward(form)):
        found = module(*inputs)
    assert not calls
    torch.testing.assert_close(found, module(*inputs), rtol=0, atol=0)


def test_rows_without_an_open_column_are_nan(calls: list[float]) -> None:
    q, k, v, mask = _inputs()
    mask[1, :, 2] = -math.inf
    with written.written_attention_fused(module := Forward(scaled_and_masked)):
        found = module(q, k, v, mask)
    assert calls == [0.0]
    assert found.isnan().any()
    torch.testing.assert_close(found, module(q, k, v, mask), equal_nan=True)


class Dropping(nn.Module):
    """Attention with dropout; ``use`` chooses what is done with the weights."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.project, self.use = nn.Linear(SIZE, SIZE).double(), use
        self.dropout = nn.Dropout(0.25)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        weights = self.dropout((self.project(q) @ k.mT).softmax(-1))
        if self.use == "by name":
            return torch.matmul(input=weights, other=v)
        if self.use == "of one head":
            return weights @ v[0, 0]
        mixed = weights @ v
        if self.use == "returned":
            return mixed, {"weights": [weights]}
        return mixed + weights.sum() if self.use == "read" else mixed


def test_the_kernel_draws_the_mask_of_dropout(calls: list[float]) -> None:
    module, inputs = Dropping("none"), _inputs()[:3]
    before = torch.get_rng_state()
    with written.written_attention_fused(module):
        module(*inputs)
    assert calls == [0.25]
    assert torch.equal(torch.get_rng_state(), before)


def _unrecorded(q: Any, k: Any, v: Any, mask: Any, p: float, *, scale: float) -> torch.Tensor:
    return SDPA(q, k, v, mask, scale=scale)


@pytest.mark.parametrize("use", thinned(["read", "returned", "by name", "of one head"], 2))
def test_weights_that_are_used_have_the_drawn_mask(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "attention_on_gpus", _unrecorded)
    eager, inputs = Dropping(use), _inputs()[:3]
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, inputs)
    torch.manual_seed(1)
    found = ours(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(found, eager(*inputs), rtol=1e-12, atol=1e-12)
    assert dispatch_report(ours).fallbacks == {}
