"""Outputs of dispatched modules have eager PyTorch's strides, for tensors of any layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from tvmbridge import add_tvm_dispatch, dispatch_report

IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LAST = IMAGE.contiguous(memory_format=torch.channels_last)


class Outputs(nn.Module):
    """A module with outputs of many memory layouts, one of which backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        features = functional.relu(self.norm(self.convolution(x)))
        tokens = features.flatten(2).transpose(1, 2)
        # Backward of tanh reads its result, of which this output is a transposed view.
        rows = torch.tanh(self.linear(tokens)).transpose(1, 2)
        return {
            "features": features,
            "pooled": functional.avg_pool2d(features, 2),
            "pair": (rows, torch.sigmoid(rows.sum(1))),
            "permuted": self.linear(tokens).permute(2, 0, 1),
            "every_second": (features * 2)[:, ::2],
            "channels": x.sum(1),
        }


def same_layout(ours: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether two tensors have equal strides and offset 0.

    If eager's tensor is not dense in memory, only the order of its dimensions must agree.
    """
    if not eager.permute(*_order(eager)).is_contiguous():
        return _order(ours) == _order(eager)
    last = torch.channels_last
    formats = eager.dim() != 4 or all(
        a.is_contiguous(memory_format=f) == b.is_contiguous(memory_format=f)
        for f in (last, torch.contiguous_format)
        for a, b in [(ours, eager)]
    )
    return formats and ours.stride() == eager.stride() and ours.storage_offset() == 0


def _order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def compare(ours: nn.Module, eager: nn.Module, x: torch.Tensor, *, backward: bool) -> None:
    given = [x.detach().requires_grad_(backward) for _ in range(2)]
    results = [pytree.tree_leaves(m(g)) for m, g in zip((ours, eager), given, strict=True)]
    assert not dispatch_report(ours).fallbacks
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert same_layout(actual, expected), (actual.stride(), expected.stride())
        assert actual._base is None
    if not backward:
        return
    flowing = [[r for r in leaves if r.requires_grad] for leaves in results]
    cotangents = [torch.randn_like(r) for r in flowing[1]]
    gradients = [
        torch.autograd.grad(leaves, [g, *m.parameters()], cotangents)
        for leaves, g, m in zip(flowing, given, (ours, eager), strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    if x is LAST:
        assert [g.stride() for g in gradients[0]] == [g.stride() for g in gradients[1]]


def test_strides_of_outputs_and_gradients_for_every_layout_of_the_input() -> None:
    eager = Outputs()
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, LAST.clone().requires_grad_())
    wide = torch.randn(2, 3, 6, 12)[..., ::2]
    for x in (LAST, IMAGE, wide):
        compare(ours, eager, x, backward=True)
    # The memory format of the weights also decides the layout of outputs.
    for module in (ours, eager):
        module.to(memory_format=torch.channels_last)
    compare(ours, eager, IMAGE, backward=True)
    # Eager PyTorch saves these outputs, so a write into one makes backward raise an error.
    for module in (ours, eager):
        for taken in (lambda r: r["features"], lambda r: r["pair"][0]):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                taken(module(LAST)).mul_(2).sum().backward()
    x = LAST.clone().requires_grad_()
    written = torch.autograd.grad(ours(x)["permuted"].mul_(2).sum(), x)
    torch.testing.assert_close(written, torch.autograd.grad(2 * eager(x)["permuted"].sum(), x))


def test_without_gradients() -> None:
    eager = Outputs().eval()
    ours = copy.deepcopy(eager)
    with torch.no_grad():
        add_tvm_dispatch(ours, IMAGE)
        for x in (IMAGE, LAST):
            compare(ours, eager, x, backward=False)
            with torch.inference_mode():
                compare(ours, eager, x, backward=False)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.scale
        return y, y.reshape(-1)


def test_layouts_under_which_forward_shares_other_memory_are_refused() -> None:
    ours = Flattened()
    with torch.no_grad():
        add_tvm_dispatch(ours, IMAGE)
        for x in (IMAGE, LAST):
            image, flat = ours(x)
            flat.zero_()
            assert bool(image.any()) is (x is LAST)
    (reason,) = dispatch_report(ours).fallbacks
    assert reason == "an input is laid out otherwise, so that other outputs would share memory"


class Viewed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, -1).sin()


def test_where_eager_raises_so_does_the_call() -> None:
    ours = Viewed()
    add_tvm_dispatch(ours, IMAGE)
    ours(IMAGE)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        ours(LAST)
    (reason,) = dispatch_report(ours).fallbacks
    assert reason.startswith("an input is laid out otherwise: ")
    assert "view size is not compatible" in reason


class Held(nn.Module):
    """A module whose outputs depend on its own tensors, one of which forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(3, 4))
        self.register_buffer("last", torch.zeros(4, 3))
        self.kept = torch.randn(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x @ self.weight)
        previous = self.last.t() + self.kept
        self.last = (y * 2).detach().transpose(0, 1)
        return y + 1, self.weight * 2, self.table.exp(), previous * y, (self.kept + 1).t()


def test_tensors_of_the_module_whose_strides_change() -> None:
    eager = Held()
    ours = copy.deepcopy(eager)
    x = torch.randn(3, 4)
    add_tvm_dispatch(ours, x)
    seen = []
    for module in (ours, eager):
        found: list[torch.Tensor] = []
        for _ in range(3):
            results = module(x)
            sum(r.square().sum() for r in results).backward()  # type: ignore[union-attr]
            found += [*results, module.get_buffer("last"), module.weight.grad.clone()]
            module.zero_grad()
            module.weight.data = module.weight.data.t().contiguous().t()
            module.table = module.table.t().contiguous().t()
            module.kept = module.kept.t().contiguous().t()
        seen.append(found)
    assert dispatch_report(ours).tvm_calls == 3
    for actual, expected in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert actual.stride() == expected.stride()


def test_forward_that_asks_how_a_weight_lies_is_not_served_where_it_lies_otherwise() -> None:
    class Asking(Held):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x @ self.weight + self.weight.is_contiguous(),)

    ours = add_tvm_dispatch(Asking(), torch.ones(3, 4))
    ours.weight.data = ours.weight.data.t()
    (result,) = ours(torch.ones(3, 4))
    torch.testing.assert_close(result, torch.ones(3, 4) @ ours.weight)
    assert dispatch_report(ours).tvm_calls == 0
