"""Constant attention masks are dropped if they mask nothing, and kept otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from tests.dispatch_helpers import eager
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.decisions import recorded_decisions, repeated_decisions
from tvmbridge.graph_capture import open_masks
from tvmbridge.graph_capture.capture import capture
from tvmbridge.graph_capture.open_masks import drop_open_masks
from tvmbridge.graph_capture.trace.fused_attention import CUDNN, EFFICIENT

Mask = Callable[[torch.Tensor], torch.Tensor]


def _open(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[-2]) + 0 >= 0)[None, None, :, None].expand(1, 1, -1, x.shape[-2])


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[-2], x.shape[-2])


def _causal(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-2])
    return (places[None] <= places[:, None])[None, None]


def _window(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-2])
    return (places[None] - places[:, None]).abs() < 3


def _long_window(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-2])
    distance = places[:, None] - places[None]
    return (distance >= 0) & (distance < 40)


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape[-2], x.shape[-2]) > 2.0 * torch.eye(x.shape[-2]).sub(1).abs()


def _of_input(x: torch.Tensor) -> torch.Tensor:
    return (x[..., 0] == x[..., 0])[..., None, :]


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, self.mask(x))


@pytest.mark.parametrize(
    ("mask", "kept", "causal"),
    [
        (_open, False, False),
        (_zeros, False, False),
        (_causal, False, True),
        (_window, True, False),
        (_random, True, False),
        (_of_input, True, False),
    ],
)
def test_what_says_nothing_goes(mask: Mask, kept: bool, causal: bool) -> None:
    x = torch.randn(2, 3, 9, 8)
    module = Attention(mask).eval()
    with torch.no_grad():
        graph = capture(module, x).program.graph
        (node,) = [n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target)]
        given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False))
        given |= node.kwargs
        assert (given.get("attn_mask") is not None) == kept
        assert bool(given.get("is_causal")) == causal
        reference = eager(module)
        add_tvm_dispatch(module, x)
        torch.manual_seed(1)
        found = module(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, reference(x), rtol=1e-5, atol=1e-6)
    assert dispatch_report(module).tvm_calls == 1


@pytest.mark.parametrize(("mask", "causal"), [(_causal, True), (_open, False), (_window, None)])
def test_a_fused_kernel_without_a_mask_is_chosen_anew(
    mask: Mask, causal: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def chosen(*given: Any) -> str:
        asked.append(given)
        return CUDNN

    monkeypatch.setattr(open_masks, "fused_kernel", chosen)

    class Fused(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            bias = torch.where(mask(x.transpose(1, 2)), 0.0, float("-inf"))
            settings = (EFFICIENT, 0.0, False, 0.5, 0)
            found: tuple[torch.Tensor, ...] = torch.ops.tvmbridge.fused_attention(
                x, x, x, bias, *settings
            )
            return found

    with FakeTensorMode():
        x = torch.randn(2, 9, 3, 8)
        graph = make_fx(Fused())(x).graph
    drop_open_masks(graph)
    (node,) = [n for n in graph.nodes if "fused_attention" in str(n.target)]
    rows = node.meta["val"][1].shape[2:]
    if causal is None:
        assert not asked
        assert (node.args[3] is None, node.args[4], node.args[6]) == (False, EFFICIENT, False)
        assert rows == (32,)
        return
    (given,) = asked
    assert [t.shape for t in given[:3]] == [torch.Size([2, 3, 9, 8])] * 3
    assert all(t.requires_grad for t in given[:3])
    assert given[3:] == (None, 0.0, causal)
    assert (node.args[3], node.args[4], node.args[6]) == (None, CUDNN, causal)
    assert rows == (9, 1)


@pytest.mark.parametrize("same", [True, False])
def test_saved_tensors_may_be_detached(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_masks, "fused_kernel", lambda *_: CUDNN)
    operators, detach = torch.ops.tvmbridge, torch.ops.aten.detach.default

    def joint(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bias = torch.where(_causal(x.transpose(1, 2)), 0.0, float("-inf"))
        settings = (EFFICIENT, 0.0, False, 0.5, 0)
        output, *others = operators.fused_attention(x, x, x, bias, *settings)
        saved = [detach(x), detach(x), detach(x if same else y), bias]
        found: tuple[torch.Tensor, ...] = operators.fused_attention_backward(
            y, detach(output), detach(others[0]), *others[1:], *saved, *settings
        )
        return (output, *found)

    with FakeTensorMode():
        x, y = torch.randn(2, 9, 3, 8), torch.randn(2, 9, 3, 8)
        graph = make_fx(joint, {})(x, y).graph
    drop_open_masks(graph)
    forward, backward = (n for n in graph.nodes if "fused_attention" in str(n.target))
    expected = (None, CUDNN, True) if same else (forward.args[3], EFFICIENT, False)
    assert (forward.args[3] is None) == same
    assert (forward.args[3], forward.args[4], forward.args[6]) == expected
    assert (backward.args[8], backward.args[9], backward.args[11]) == expected


def _is_dropped(mask: Mask, size: int) -> bool:
    with torch.no_grad():
        graph = capture(Attention(mask).eval(), torch.ones(1, 1, size, 4)).program.graph
    (node,) = (n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target))
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False))
    return (given | node.kwargs).get("attn_mask") is None


def test_an_open_mask_of_any_size_is_dropped_where_it_repeats_a_small_one() -> None:
    assert _is_dropped(_open, 1 << 14)


class Packed(nn.Module):
    """Attention with a mask of packed sequences, which is causal for all rows of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[0], x.shape[2]
        places = torch.arange(length)[None].expand(rows, -1)
        jumps = torch.diff(places, prepend=places[:, :1] - 1)
        sequence = (jumps != 1).cumsum(-1)
        row = torch.arange(rows)[:, None, None, None]
        query, key = torch.arange(length)[None, None, :, None], torch.arange(length)
        mask = (places[row, key] <= places[row, query]).to(x.device, torch.bool)
        mask = mask & (sequence[row, query] == sequence[row, key])
        return functional.scaled_dot_product_attention(x, x, x, mask)


def test_a_mask_that_is_the_same_for_all_rows_is_computed_for_one() -> None:
    with torch.no_grad():
        graph = capture(Packed().eval(), torch.ones(300, 1, 600, 4)).program.graph
    (node,) = (n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target))
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False))
    given |= node.kwargs
    assert given.get("attn_mask") is None
    assert given["is_causal"]


@pytest.mark.parametrize("most", but_slow([1 << 26, 400], 1 << 26))
def test_a_mask_that_is_causal_at_some_sizes_alone_has_code_for_any_size(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_masks, "MOST_ELEMENTS", most)
    module = Attention(_long_window).eval()
    reference = eager(module)
    add_tvm_dispatch(module, dynamic_shapes="auto")
    with torch.no_grad():
        for size in (9, 12, 60, 7):
            x = torch.randn(1, 2, size, 8)
            torch.testing.assert_close(module(x), reference(x), rtol=1e-5, atol=1e-6)
    assert not dispatch_report(module).fallbacks


def test_masks_that_are_open_at_some_sizes_alone_are_kept() -> None:
    assert _is_dropped(_window, 3)
    with recorded_decisions() as decisions:
        assert not _is_dropped(_window, 7)
    with repeated_decisions(decisions):
        assert not _is_dropped(_window, 3)
