"""FuseCrossEntropy: losses and gradients are those of eager PyTorch, from the logits themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.passes.relax.lowered import lowered_text
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.fuse_cross_entropy import FuseCrossEntropy

OPTIONS = CompileOptions(extra_passes=(FuseCrossEntropy(),))


class _Classifier(nn.Module):
    """A linear layer and its loss.

    TVM's Gradient has no rule for the Bessel function, so that PyTorch traces the joint function.
    Its graph has the kernels of ``nll_loss``.
    """

    def __init__(
        self, classes: int, rounded: torch.dtype = torch.float64, **arguments: object
    ) -> None:
        super().__init__()
        self.rounded = rounded
        self.head, self.arguments = nn.Linear(5, classes), arguments

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.special.i0e(x))
        logits = logits.to(self.rounded).to(logits.dtype)
        flat = logits.reshape(-1, logits.shape[-1])
        return functional.cross_entropy(flat, target.reshape(-1), **self.arguments), logits  # type: ignore[arg-type]


def _sample(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, classes, (3, 4))
    target[0, 1] = target[2, 3] = -100
    return x, target


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in ({}, {"reduction": "sum"}, {"ignore_index": 2})
        ),
        {"label_smoothing": 0.1},
        {"rounded": torch.float16},
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_eager(arguments: dict[str, object]) -> None:
    eager = _Classifier(7, **arguments).double()
    x, target = _sample(7)
    if "ignore_index" in arguments:
        target = target.clamp(min=0)

    def step() -> list[torch.Tensor]:
        loss, logits = eager(x, target)
        leaves = [x, *eager.parameters()]
        return [loss, logits, *torch.autograd.grad(loss * 3 + logits[0].sin().sum(), leaves)]

    expected = step()
    add_tvm_dispatch(eager, (x, target), options=OPTIONS)
    for found, wanted in zip(step(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert dispatch_report(eager).tvm_calls == 1


class _Rounded(_Classifier):
    """A loss of logarithms that were rounded to half precision, as under autocast on a GPU."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.special.i0e(x)).reshape(-1, self.head.out_features)
        logarithms = functional.log_softmax(logits, -1).to(torch.float16).to(logits.dtype)
        return functional.nll_loss(logarithms, target.reshape(-1), **self.arguments), logits  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments", [pytest.param({}, marks=pytest.mark.slow), {"reduction": "sum"}], ids=str
)
def test_rounded_logarithms_are_those_of_eager(arguments: dict[str, object]) -> None:
    module = _Rounded(7, **arguments).double()
    x, target = _sample(7)

    def step() -> list[torch.Tensor]:
        loss, logits = module(x, target)
        return [loss, logits, *torch.autograd.grad(loss * 3, [x, *module.parameters()])]

    expected = step()
    add_tvm_dispatch(module, (x, target), options=OPTIONS)
    for found, wanted in zip(step(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).tvm_calls == 1
    text = lowered_text(_Rounded(7, **arguments).double(), (x, target), OPTIONS)
    assert "nll_loss" not in text["forward"] + text["backward"]


@pytest.fixture(scope="module")
def served() -> _Classifier:
    module = _Classifier(7).double()
    add_tvm_dispatch(module, _sample(7), options=OPTIONS)
    return module


def test_only_ignored_targets_give_nan_as_in_eager(served: _Classifier) -> None:
    module, (x, target) = served, _sample(7)
    before = dispatch_report(module).tvm_calls
    loss, _ = module(x, torch.full_like(target, -100))
    assert dispatch_report(module).tvm_calls == before + 1
    assert loss.isnan()


def test_a_target_that_is_no_class_raises(served: _Classifier) -> None:
    x, target = _sample(7)
    with pytest.raises((IndexError, RuntimeError)):
        served(x, torch.full_like(target, 7))


def test_large_logits_are_as_exact_as_in_eager() -> None:
    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(logits, target) + 0 * torch.special.i0e(logits[0, 0])

    logits = (torch.randn(16, 9) + 1e4).requires_grad_()
    target = torch.randint(0, 9, (16,))
    exact = functional.cross_entropy(logits.double(), target)
    module = Loss()
    add_tvm_dispatch(module, (logits, target), options=OPTIONS)
    assert (module(logits, target).double() - exact).abs() < 1e-6
    assert dispatch_report(module).tvm_calls == 1


def test_no_tensor_as_large_as_the_logits_is_kept_beside_them() -> None:
    x, target = _sample(7)
    plain = lowered_text(_Classifier(7).double(), (x, target), CompileOptions())
    assert "nll_loss_forward" in plain["forward"]
    text = lowered_text(_Classifier(7).double(), (x, target), OPTIONS)
    assert "nll_loss" not in text["forward"] + text["backward"]
    assert "gather" in text["forward"]
