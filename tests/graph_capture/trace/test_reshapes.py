"""Views of results whose strides differ between eager PyTorch and an operator's decomposition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import CaptureError


class Heads(nn.Module):
    """Self-attention that views its result, in the query's memory order, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.rows(x).split(16, dim=2)]
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous().view(x.shape)
        mixed = mixed.clone().view(-1, 16)
        mixed[0] *= 2
        mixed.view(-1)[3:5].add_(1)
        mixed = mixed.view(x.shape)
        result: torch.Tensor = self.out(mixed)
        return result


class WrittenThroughView(nn.Module):
    """Writes through a view, and returns a result of the view's base."""

    def forward(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 3
        y.view(-1)[2:4] = 0.0
        mixed = scaled_dot_product_attention(q, q, q)
        return y * 2, mixed.transpose(1, 2).view(2, -1)


class WrittenAttention(nn.Module):
    """Writes through a view of attention's result, whose strides its decomposition changes."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        mixed = scaled_dot_product_attention(q, q, q)
        mixed.transpose(1, 2).view(-1)[2:4] = 0.0
        return mixed * 2


MODULES = {
    "written": Heads(),
    "rows first": nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0),
    "decoder": nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", but_slow(MODULES, "rows first", "decoder"))
def test_results_of_attention_are_viewed(name: str) -> None:
    module = copy.deepcopy(MODULES[name]).double().train()
    ours = copy.deepcopy(module)
    sample = [torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)]
    sample *= 2 if name == "decoder" else 1
    add_tvm_dispatch(ours, tuple(sample))
    results = []
    for m in (ours, module):
        result = m(*sample)
        wanted = [*m.parameters(), sample[0]]
        results.append((result, *torch.autograd.grad(result.square().sum(), wanted)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    assert dispatch_report(ours).fallbacks == {}


def test_a_write_through_a_view_is_not_lost() -> None:
    module = WrittenThroughView()
    sample = (torch.randn(4, 3, requires_grad=True), _rows_first())
    ours = add_tvm_dispatch(copy.deepcopy(module), sample)
    torch.testing.assert_close(ours(*sample), module(*sample))
    assert dispatch_report(ours).fallbacks == {}


def test_a_write_that_would_be_lost_is_refused() -> None:
    with pytest.raises(CaptureError, match="Cannot view"):
        add_tvm_dispatch(WrittenAttention(), _rows_first())


def _rows_first() -> torch.Tensor:
    """Return queries of two heads with the strides that a projection gives them."""
    return torch.randn(2, 6, 16, requires_grad=True).view(2, 6, 2, 8).transpose(1, 2)


class Windows(nn.Module):
    """Reads overlapping windows of a transposed result that was written before, or is after."""

    def __init__(self, *, writes_after: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.writes_after = writes_after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y /= 2
        rows = y.transpose(0, 1)
        windows = rows.as_strided((rows.shape[0], 4, 2), (rows.stride(0), rows.stride(1), 4))
        if self.writes_after:
            y *= 2
        return windows.tanh()


def test_windows_of_memory_that_was_written() -> None:
    module = Windows(writes_after=False).double()
    reference = copy.deepcopy(module)
    x = torch.randn(5, 4, dtype=torch.float64)
    add_tvm_dispatch(module, x)
    results = [m(x) for m in (module, reference)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    for result in results:
        result.square().sum().backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).tvm_calls == 1


def test_windows_of_memory_that_is_written_later_are_refused() -> None:
    with pytest.raises(CaptureError, match="depends on the strides of its input"):
        add_tvm_dispatch(Windows(writes_after=True), torch.randn(5, 4), on_break="forward")
