"""Networks whose images have channels last on the CPU, where that was measured to be faster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.passes.relax.lowered import lowered_text
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.kernels import channels_last
from tvmbridge.kernels.channels_last import faster_with_channels_last
from tvmbridge.kernels.packed_convolution import PackedForm
from tvmbridge.schedules import alone

FORM = PackedForm((8, 16, 32, 32), (32, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Answers to the questions of the choice, by how they begin; nothing is measured."""
    found = {"channels": "last", "precision": "precise"}

    def answer(question: str, among: Sequence[str], measure: Callable[[], str]) -> str:
        del among, measure
        return found[question.split()[0]]

    monkeypatch.setattr(channels_last, "choice", answer)
    return found


class Net(nn.Module):
    """Convolutions, norms, a branch with squeeze and excitation, pooling, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.out, self.head = nn.Conv2d(32, 24, 3, stride=2), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.stem(x)))
        y = self.deep(x)
        y = y * torch.sigmoid(self.excite(nn.functional.relu(self.squeeze(y.mean((2, 3), True)))))
        z = self.out(nn.functional.max_pool2d(torch.cat([x, y], 1), 2))
        result: torch.Tensor = self.head(z.mean((2, 3)))
        return result


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("training", [False, True])
def test_results_and_gradients_are_eager_s(training: bool) -> None:
    torch.manual_seed(0)
    module = Net().train(training)
    reference = copy.deepcopy(module).double()
    x = torch.randn(4, 3, 40, 40)
    add_tvm_dispatch(module, x, options={"cache": False})
    with torch.set_grad_enabled(training):
        found, expected = module(x), reference(x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    if training:
        found.square().sum().backward()
        expected.square().sum().backward()
        for (name, one), other in zip(
            module.named_parameters(), reference.parameters(), strict=True
        ):
            scale = other.grad.abs().max()
            assert (one.grad.double() - other.grad).abs().max() <= 1e-4 * scale + 1e-6, name
    assert dispatch_report(module).tvm_calls == 1


def _text(**options: bool) -> str:
    torch.manual_seed(0)
    chosen = CompileOptions(**options)  # type: ignore[arg-type]
    return lowered_text(Net().eval(), (torch.randn(4, 3, 40, 40),), chosen)["forward"]


@torch.no_grad()
def test_the_convolutions_decide_together(answers: dict[str, str]) -> None:
    text = _text()
    assert text.count("R.nn.conv2d(") == text.count('data_layout="NHWC"') > 1
    assert "NHWC" not in _text(measure_kernels=False)
    answers["precision"] = ""  # each keeps channels second
    assert "NHWC" not in _text()
    answers["channels"] = "second"
    assert "NHWC" not in _text()


def test_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(question: str, among: Sequence[str], measure: Callable[[], str]) -> str:
        asked.append(question)
        found = measure()
        assert found in among
        return found

    monkeypatch.setattr(channels_last, "choice", answer)
    found = faster_with_channels_last([FORM, FORM], True, alone.convolution)
    assert found <= {FORM}
    assert asked[0].startswith("channels of 2 convolutions with gradients, ")
    if found:
        assert FORM.of_images(4).spec in asked[-1]  # fewer images are measured
    assert not faster_with_channels_last([], True, alone.convolution)


def test_small_networks_are_not_measured(answers: dict[str, str]) -> None:
    answers.clear()
    small = PackedForm((1, 3, 8, 8), (8, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    assert not faster_with_channels_last([small], False, alone.convolution)


@pytest.mark.usefixtures("answers")
def test_a_pointwise_convolution_of_few_channels_with_a_stride() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 16, 1, stride=2))
    reference = copy.deepcopy(module).double()
    x = torch.randn(7, 3, 128, 128)
    add_tvm_dispatch(module, x, options={"only_if_faster": False})
    module(x).square().mean().backward()
    reference(x.double()).square().mean().backward()
    for found, expected in zip(module.parameters(), reference.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad.float(), rtol=1e-4, atol=1e-6)
    assert dispatch_report(module).tvm_calls == 1
