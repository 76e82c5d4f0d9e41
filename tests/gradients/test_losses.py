"""Classification losses: TVM's Gradient differentiates them, and values equal eager PyTorch's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tvmbridge import add_tvm_dispatch, dispatch_report

F64 = torch.float64


class Losses(nn.Module):
    """A module that computes ``cross_entropy`` or ``nll_loss`` with several sets of options."""

    def __init__(self, **choices: dict[str, Any]) -> None:
        super().__init__()
        self.choices = {name: dict(options) for name, options in choices.items()}
        for name, options in self.choices.items():
            if "weight" in options:
                self.register_buffer(name, torch.tensor(options.pop("weight"), dtype=F64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for name, options in self.choices.items():
            rest = {n: value for n, value in options.items() if n != "alone"}
            loss = functional.nll_loss if "alone" in options else functional.cross_entropy
            losses.append(loss(x, target, self._buffers.get(name), **rest))
        return losses


TARGETS = {
    "rows": ((6, 5), [0, 4, 2, 2, 1, 3]),
    "one row": ((5,), 3),
    "pictures": ((2, 5, 2, 3), [[[0, 1, 4], [2, 2, 3]], [[4, 4, 0], [1, 3, 3]]]),
    "sequences": ((2, 5, 3), [[0, 1, 4], [2, 2, 3]]),
}
WEIGHT = [0.5, 2.0, 0.0, 1.0, 3.0]
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weights": {"weight": WEIGHT},
    "weights_none": {"weight": WEIGHT, "reduction": "none"},
    "weights_sum": {"weight": WEIGHT, "reduction": "sum"},
    "infinite_weight": {"weight": [1.0, math.inf, 1.0, 1.0, 1.0]},
    "smoothed": {"label_smoothing": 0.1, "weight": WEIGHT},
    "nll": {"alone": True, "weight": WEIGHT},
}


def _step(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses, and the gradient of each loss."""
    x = x.clone().requires_grad_()
    losses = module(x, target)
    found = list(losses)
    for loss in losses:
        weighted = (loss.flatten() * torch.arange(1.0, 1 + loss.numel())).sum()
        found += torch.autograd.grad(weighted, x, retain_graph=True)
    return found


@pytest.mark.parametrize(
    ("shape", "ignored"),
    [
        ("rows", -100),
        pytest.param("one row", 2, marks=pytest.mark.slow),
        pytest.param("pictures", 2, marks=pytest.mark.slow),
        pytest.param("sequences", -100, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_eager(shape: str, ignored: int) -> None:
    size, places = TARGETS[shape]
    x = torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(1))
    module = Losses(**{n: {**o, "ignore_index": ignored} for n, o in OPTIONS.items()}).train()
    reference = copy.deepcopy(module)
    target = torch.tensor(places)
    add_tvm_dispatch(module, (x.clone().requires_grad_(), target))
    for given in (target, torch.full_like(target, ignored), target * 0 + 1, target * 0 + 2):
        ours, theirs = _step(module, x, given), _step(reference, x, given)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})
    assert [(s.joint, s.joint_reason) for s in report.specializations] == [("relax", "")]


@pytest.mark.parametrize("wrong", [5, -1, -100], ids=str)
def test_targets_out_of_range_raise_as_in_eager(wrong: int) -> None:
    x = torch.randn(3, 5, dtype=F64, requires_grad=True)
    module = add_tvm_dispatch(
        Losses(loss={"ignore_index": 3}).train(), (x, torch.tensor([0, 1, 3]))
    )
    target = torch.tensor([0, wrong, 3])
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(x, target, ignore_index=3)
    with pytest.raises(IndexError, match="out of bounds"):
        module(x, target)
    torch.testing.assert_close(
        module(x, torch.tensor([0, 4, 3]))[0],
        functional.cross_entropy(x, torch.tensor([0, 4, 3]), ignore_index=3),
    )


def test_a_classifier_trains_by_tvms_gradient() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
            self.head = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(self.body(x)), target)

    torch.manual_seed(0)
    module = Classifier().double().train()
    reference = copy.deepcopy(module)
    x, target = torch.randn(6, 8, dtype=F64), torch.tensor([0, 4, 2, 2, 1, 3])
    add_tvm_dispatch(module, (x, target))
    for net in (module, reference):
        net(x, target).backward()
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)
    (made,) = dispatch_report(module).specializations
    assert (made.joint, made.aten_operators) == ("relax", {})
