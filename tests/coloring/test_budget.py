"""Residuals under a memory budget: training equals eager PyTorch, and the bytes fit."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from examples.pretrain import Block
from tests.joint_steps import assert_same, step
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report, explain

BUDGETS = (0.3, 0.5, 0.7)


class Pictures(nn.Module):
    """Convolutions, batch norms, pooling with indices, kinks and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            x = nn.functional.relu(norm(convolution(x)))
            x = nn.functional.dropout(x, 0.2, self.training)
            x = nn.functional.max_pool2d(x, 3, 2, 1) if number == 0 else x
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Two Llama blocks with a comparison of rounded values between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(8, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
            x = torch.where(x > x.mean(), x, 0.1 * x)
        return x


def trained(module: nn.Module, x: Any, budget: float) -> Any:
    """Compare two steps with eager PyTorch; return the report of the compiled code."""
    module, x = module.double().train(), x.double() if x.is_floating_point() else x
    eager = copy.deepcopy(module)
    sample = x.clone().requires_grad_() if x.is_floating_point() else x
    add_tvm_dispatch(module, sample, options={"memory_budget": budget})
    for _ in range(2):
        assert_same(step(module, (x,)), step(eager, (x,)))
    (made,) = dispatch_report(module).specializations
    assert not dispatch_report(module).fallbacks
    assert made.recomputation is not None
    assert made.residual_bytes == made.recomputation.kept_bytes
    assert made.residual_bytes <= budget * made.recomputation.full_bytes
    return made


@pytest.mark.parametrize("budget", [0.3, pytest.param(0.6, marks=pytest.mark.slow)])
def test_pictures_train_as_in_eager(budget: float) -> None:
    torch.manual_seed(0)
    trained(Pictures(), torch.randn(2, 3, 8, 8), budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_words_train_as_in_eager(budget: float) -> None:
    torch.manual_seed(0)
    trained(Words(), torch.randn(2, 8, 32), budget)


@pytest.fixture(scope="module")
def libraries() -> None:
    """Import the libraries before a test, because they change the warning filters."""
    for name in ("transformers", "torchvision"):
        pytest.importorskip(name)


def bert() -> tuple[nn.Module, torch.Tensor]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        vocab_size=99, return_dict=False, use_cache=False,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False), torch.randint(0, 99, (2, 32))


def resnet() -> tuple[nn.Module, torch.Tensor]:
    import torchvision

    return torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 64, 64)


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("made", [bert, resnet])
def test_models_train_as_in_eager(made: Any, budget: float) -> None:
    torch.manual_seed(0)
    trained(*made(), budget)


def test_the_report_predicts_before_compiling() -> None:
    module, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).train(), torch.randn(4, 16)
    whole, half = (explain(module, x, options={"memory_budget": b}) for b in (1.0, 0.4))
    assert whole.recomputation is not None
    assert half.recomputation is not None
    assert half.residual_bytes == half.recomputation.kept_bytes < whole.residual_bytes
    assert half.recomputation.predicted > whole.recomputation.predicted == 1.0
    assert str(half.recomputation).split(";")[0] in str(half).replace("\n", " ")
    assert explain(module, x).recomputation is None


def test_a_budget_that_nothing_fits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A dropout mask is drawn once, and kept whatever the budget is."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    with caplog.at_level(logging.WARNING, "tvmbridge"):
        report = explain(module, torch.randn(4, 8), options={"memory_budget": 0.01})
    assert report.recomputation is not None
    assert not report.recomputation.fits
    assert report.residual_bytes == report.recomputation.kept_bytes
    assert [r.spec.nbytes for r in report.residuals if r.made_by == "draw"] == [4 * 8]
    assert "the least that is possible" in caplog.text


@pytest.mark.parametrize("budget", [0, -0.5, 1.5, float("nan"), True, "0.5"])
def test_a_bad_budget_raises(budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        CompileOptions(memory_budget=budget)
