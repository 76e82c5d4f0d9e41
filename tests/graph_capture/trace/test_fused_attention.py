"""The operators of fused attention, tested with PyTorch's formulas in place of GPU kernels."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.gpu.blocks import Block, LlamaBlock
from tests.passes.relax.lowered import lowered_text
from tests.thinned import but_slow, thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.coloring.operators import check_names
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture import open_masks
from tvmbridge.graph_capture.trace import fused_attention as fused
from tvmbridge.graph_capture.trace.function_table import HANDLERS, Call
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.read_views import ReadViews
from tvmbridge.runtime.guards.mode import Mode

SDPA = functional.scaled_dot_product_attention


def _mixed(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float) -> torch.Tensor:
    inside = (t.transpose(1, 2) for t in (q, k, v))
    return SDPA(*inside, bias, 0.0, causal, scale=scale).transpose(1, 2).contiguous()


def _forward(q: Any, k: Any, v: Any, bias: Any, kernel: str, *rest: Any) -> Any:
    _, causal, scale, _ = rest
    _, *others = fused._forward_fake(q, k, v, bias, kernel)
    return _mixed(q, k, v, bias, causal, scale), *(torch.zeros_like(t) for t in others)


def _backward(gradient: Any, *args: Any) -> Any:
    q, k, v, bias, _, _, causal, scale, _ = args[4:]
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        found = _mixed(*leaves, bias, causal, scale)
    return tuple(t.contiguous() for t in torch.autograd.grad(found, leaves, gradient))


def _backward_with_bias(gradient: Any, *args: Any) -> Any:
    q, k, v, bias, _, _, causal, scale, _ = args[4:]
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, bias)]
    with torch.enable_grad():
        found = _mixed(*leaves, causal, scale)
    return tuple(t.contiguous() for t in torch.autograd.grad(found, leaves, gradient))


def _handler(call: Call, args: Any, kwargs: Any) -> Any:
    q, k, v, *_ = args
    bias = kwargs.get("attn_mask")
    causal, scale = kwargs.get("is_causal", False), 1.0 / math.sqrt(q.shape[-1])
    if torch.is_grad_enabled() and q.requires_grad:
        p = kwargs.get("dropout_p", 0.0)
        kernel = "flash" if bias is None else "efficient"
        return fused.fused_attention(q, k, v, bias, p, causal, scale, kernel)
    return fused.plain_attention(q, k, v, None, causal, None, False)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = torch.library.Library("tvmbridge", "FRAGMENT")
    library.impl("fused_attention", _forward, "CPU")
    library.impl("fused_attention_backward", _backward, "CPU")
    library.impl("fused_attention_backward_with_bias", _backward_with_bias, "CPU")
    monkeypatch.setitem(HANDLERS, SDPA, {0: _handler})
    yield
    library._destroy()


def _assert_same_steps(tvm: nn.Module, eager: nn.Module, x: torch.Tensor) -> None:
    """Compare the results of one step of both modules, and all gradients."""
    results = []
    for module in (tvm, eager):
        given = x.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        results.append([output, given.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", but_slow([32, 36], 32))
def test_forward_and_backward(width: int) -> None:
    """Heads have a size of 8, or one of 9, which is padded."""
    torch.manual_seed(0)
    eager = Block(width, 4, causal=True).double()
    tvm, x = copy.deepcopy(eager), torch.randn(2, 7, width, dtype=torch.float64)
    add_tvm_dispatch(tvm, x.clone().requires_grad_())
    assert "tvmbridge.fused_attention_backward.default" in dispatch_report(tvm).aten_calls
    _assert_same_steps(tvm, eager, x)
    with torch.no_grad():
        add_tvm_dispatch(tvm, x)
        torch.testing.assert_close(tvm(x), eager(x), rtol=1e-12, atol=1e-12)
    assert "tvmbridge.attention.default" in dispatch_report(tvm).aten_calls
    assert dispatch_report(tvm).fallbacks == {}


class Biased(nn.Module):
    """Attention with a trained bias, which the batch shares and which may have one column."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 7, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed: torch.Tensor = SDPA(heads, heads, heads, attn_mask=self.bias[None])
        return mixed.transpose(1, 2)


@pytest.mark.parametrize("columns", [7, 1])
def test_a_bias_that_trains(columns: int) -> None:
    torch.manual_seed(0)
    eager = Biased(columns).double()
    tvm, x = copy.deepcopy(eager), torch.randn(2, 7, 32, dtype=torch.float64)
    add_tvm_dispatch(tvm, x.clone().requires_grad_())
    name = "tvmbridge.fused_attention_backward_with_bias.default"
    assert name in dispatch_report(tvm).aten_calls
    results = []
    for module in (tvm, eager):
        given = x.clone().requires_grad_()
        module(given).square().sum().backward()
        results.append([given.grad, module.bias.grad])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


class Masked(nn.Module):
    """Attention with a mask that depends only on sizes: a causal mask within a window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.project, self.window = nn.Linear(32, 32), window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (4, -1)).transpose(1, 2)
        places = torch.arange(x.shape[1])
        packed = (torch.diff(places, prepend=places[:1] - 1) != 1).cumsum(-1)
        seen = (places[:, None] >= places) & (places[:, None] < places + self.window)
        seen = seen & (packed[:, None] == packed)
        bias = torch.where(seen, torch.zeros((), dtype=x.dtype), float("-inf"))
        mixed: torch.Tensor = SDPA(heads, heads, heads, attn_mask=bias[None, None])
        return mixed.transpose(1, 2)


@pytest.mark.parametrize(("window", "kernel"), thinned([(99, "flash"), (3, "efficient")], 2))
def test_a_causal_mask_is_dropped_from_a_joint_graph(
    window: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_masks, "fused_kernel", lambda *_: "flash")
    torch.manual_seed(0)
    eager = Masked(window).double()
    tvm, x = copy.deepcopy(eager), torch.randn(2, 7, 32, dtype=torch.float64)
    lowered = lower_module(
        CompileRequest(
            copy.deepcopy(eager),
            (x.clone().requires_grad_(),),
            {},
            needs_grad=True,
            options=CompileOptions(),
        ),
        records=[],
        measure=lambda _: nullcontext(),
    )
    for name in ("forward", "backward"):
        text = lowered.mod[name].script(show_meta=False)
        (line,) = [n for n in text.splitlines() if "tvmbridge.fused_attention" in n]
        assert f'\\"{kernel}\\"' in line
    add_tvm_dispatch(tvm, x.clone().requires_grad_())
    results = []
    for module in (tvm, eager):
        given = x.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        results.append([output, given.grad, module.project.weight.grad])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shape", [(1, 3, 5, 197), (2, 1, 1, 197), (3, 5, 1), (5, 197), (2, 3, 5, 200)]
)
def test_a_bias_is_spread_for_the_kernel(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 5, 3, 8), torch.randn(2, shape[-1] if shape[-1] > 1 else 197, 3, 8)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    spread = fused._spread(bias, query, key)
    expected = bias.expand(2, 3, 5, key.shape[1])
    torch.testing.assert_close(spread, expected, rtol=0.0, atol=0.0)
    assert all(n % 8 == 0 for n in spread.stride()[:-1])
    cotangent = torch.randn_like(spread)
    (wanted,) = torch.autograd.grad(expected, bias, cotangent)
    found = fused._bias_gradient(cotangent, bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 1, 1, 7), (3, 5, 1), (5, 7), (2, 3, 5, 7)])
def test_a_bias_has_four_dimensions_for_cudnn(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 3, 8)
    bias = torch.randn(shape)
    rows = fused._rows(bias, query, key)
    assert rows.shape[1] in (1, 3)
    assert rows.stride(-1) == 1
    assert torch.equal(rows.expand(2, 3, 5, 7), bias.expand(2, 3, 5, 7))


@pytest.mark.parametrize(
    ("mask", "version", "kernel"),
    [
        (None, 0, "cudnn"),
        (torch.bool, 91900, "cudnn"),
        (torch.bool, 90800, ""),
        (torch.float32, 91900, ""),
    ],
)
def test_cudnn_takes_masks_of_booleans(
    mask: torch.dtype | None, version: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its older versions give no zeros for rows without an open column."""
    monkeypatch.setattr(fused, "chosen_attention", lambda *_, **__: fused._CUDNN_CHOICE)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    heads = torch.randn(2, 3, 5, 8)
    given = None if mask is None else torch.ones(5, 5, dtype=mask)
    assert fused.fused_kernel(heads, heads, heads, given, 0.0, is_causal=False) == kernel


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        first, second = (SDPA(heads, heads, heads, dropout_p=0.5) for _ in range(2))
        return first.transpose(1, 2) - second.transpose(1, 2)


def test_heads_are_not_moved_and_two_draws_stay_two() -> None:
    lowered = lower_module(
        CompileRequest(
            Twice(),
            (torch.randn(2, 7, 32, requires_grad=True),),
            {},
            needs_grad=True,
            options=CompileOptions(),
        ),
        records=[],
        measure=lambda _: nullcontext(),
    )
    text = lowered.mod["forward"].script(show_meta=False)
    assert text.count("tvmbridge.fused_attention.default") == 2
    assert "permute_dims" not in text


@pytest.mark.slow
def test_rotated_heads_are_written_after_tokens() -> None:
    """Kernels return gradients in the memory order of their operands: no copy follows them."""
    torch.manual_seed(0)
    eager = LlamaBlock(32, 4, 7).double()
    tvm, x = copy.deepcopy(eager), torch.randn(2, 7, 32, dtype=torch.float64)
    passes = ReadViews(), DeadCodeElimination()
    options = CompileOptions(residual_policy="keep_operands", extra_passes=passes)
    given = x.clone().requires_grad_()
    texts = lowered_text(copy.deepcopy(eager), (given,), options)
    for text in texts.values():
        (line,) = [n for n in text.splitlines() if "tvmbridge.fused_attention" in n]
        assert "view" not in line
    # Forward keeps the heads in the order that it writes anyway.
    moved = re.findall(r"(\w+): .* = R.permute_dims", texts["backward"])
    assert not set(moved) & set(re.findall(r"\w+", line))
    add_tvm_dispatch(tvm, given, options=options)
    _assert_same_steps(tvm, eager, x)
    assert dispatch_report(tvm).fallbacks == {}


def test_a_kernel_with_dropout_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="drawn once"):
        check_names(["tvmbridge.fused_attention.default"])


def test_a_mode_names_kernels_that_are_switched_off() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mode = Mode.of_now(True, True)
    assert mode.attention_off == ("flash", "efficient", "cudnn")
    assert "attention without flash, efficient, cudnn" in str(mode)
    assert Mode.of_now(True, True).attention_off == ()
