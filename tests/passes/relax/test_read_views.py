"""ReadViews: attention on strided views gives the same values, and copies where it must."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.passes.relax.lowered import lowered_text
from tests.thinned import thinned
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.read_views import ReadViews

OPTIONS = CompileOptions(extra_passes=(ReadViews(), DeadCodeElimination()))
HEADS = 4

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _stacked(x: torch.Tensor) -> Heads:
    """The heads of a vision transformer: query, key and value are a dimension of their own."""
    batch, tokens, size = x.shape
    query, key, value = x.reshape(batch, tokens, 3, HEADS, size // 3 // HEADS).unbind(2)
    return query, key, value


def _split(x: torch.Tensor) -> Heads:
    """The heads of GPT-2: query, key and value are split, each of all heads."""
    batch, tokens, size = x.shape
    parts = (p.reshape(batch, tokens, HEADS, -1) for p in x.split(size // 3, dim=2))
    query, key, value = parts
    return query, key, value


def _interleaved(x: torch.Tensor) -> Heads:
    """The heads of GPT-NeoX: each head has its query, key and value."""
    batch, tokens, _ = x.shape
    query, key, value = x.view(batch, tokens, HEADS, -1).chunk(3, dim=-1)
    return query, key, value


class _Attention(nn.Module):
    def __init__(self, heads: Callable[[torch.Tensor], Heads], size: int) -> None:
        super().__init__()
        self.heads, self.product = heads, nn.Linear(24, 3 * HEADS * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(self.product(x))
        found: torch.Tensor = torch.ops.tvmbridge.attention(
            query, key, value, None, False, None, False
        )
        return found


@pytest.mark.parametrize("heads", [_stacked, _split, _interleaved])
@torch.no_grad()
def test_values_are_those_of_eager_without_copies(heads: Callable[[torch.Tensor], Heads]) -> None:
    module = _Attention(heads, 8).double().eval()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    expected = module(x)
    text = lowered_text(module, (x,), OPTIONS)["forward"]
    assert text.count(json.dumps('"view"')[1:-1]) == 3
    assert not any(name in text for name in ("R.permute_dims(lv", "R.strided_slice", "R.split"))
    add_tvm_dispatch(module, (x,), options=OPTIONS)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).tvm_calls == 1


@torch.no_grad()
def test_rows_that_begin_off_alignment_are_copied() -> None:
    module = _Attention(_interleaved, 3).eval()
    x = torch.randn(2, 5, 24)
    expected = module(x)
    assert "view" not in lowered_text(module, (x,), OPTIONS)["forward"].replace("views", "")
    add_tvm_dispatch(module, (x,), options=OPTIONS)
    torch.testing.assert_close(module(x), expected)


class _Rotated(nn.Module):
    """Attention of heads that a sum computes before the tokens, as rotary positions do."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.product, self.returned = nn.Linear(24, 3 * HEADS * 8), returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = (heads.transpose(1, 2) for heads in _stacked(self.product(x)))
        key = key + key.flip(-1)
        given = query.sin().transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        found = torch.ops.tvmbridge.attention(*given, None, False, None, False)
        return (found, key) if self.returned else (found,)


@pytest.mark.parametrize(("returned", "views"), thinned([(True, 2), (False, 1)], 2))
@torch.no_grad()
def test_loops_write_heads_after_tokens(returned: bool, views: int) -> None:
    module = _Rotated(returned).double().eval()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    expected = module(x)
    text = lowered_text(module, (x,), OPTIONS)["forward"]
    # The value is a view. The key is one if it is returned: loops write it once.
    assert text.count(json.dumps('"view"')[1:-1]) == views
    add_tvm_dispatch(module, (x,), options=OPTIONS)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


class _Experts(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, rows, 16, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)
        return found


def test_weights_of_experts_are_not_transposed() -> None:
    module, ends = _Experts(24), torch.tensor([2, 7, 10], dtype=torch.int32)
    given = torch.randn(10, 16).bfloat16().requires_grad_(), ends
    eager = copy.deepcopy(module)
    expected = eager(*given)
    expected.float().square().sum().backward()
    wanted, given[0].grad = given[0].grad, None
    with torch.no_grad():
        text = lowered_text(copy.deepcopy(module).eval(), given, OPTIONS)["forward"]
    assert text.count(json.dumps('"view"')[1:-1]) == 1
    assert "R.permute_dims" not in text
    add_tvm_dispatch(module, given, options=OPTIONS)
    found = module(*given)
    assert torch.equal(found, expected)
    found.float().square().sum().backward()
    torch.testing.assert_close(given[0].grad, wanted, rtol=0, atol=0)
    torch.testing.assert_close(module.up.grad, eager.up.grad, rtol=0, atol=0)
    assert dispatch_report(module).tvm_calls == 1
