"""``torch.distributions`` in forward check their values at each call."""

from __future__ import annotations

import pytest
import torch
from torch import distributions, nn

from tests.dispatch_helpers import assert_same_step, eager, sample
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


class Samples(nn.Module):
    """Draws from several distributions, and computes log probabilities of the draws."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loc = self.loc(x)
        scale = (x - 1.0).exp() - 0.01
        normal = distributions.Normal(loc, scale)
        latent = normal.rsample()
        label = distributions.Categorical(logits=latent)
        gamma = distributions.Gamma(loc.exp(), 1.0)
        coin = distributions.Bernoulli(logits=loc).sample()
        score = normal.log_prob(coin).sum(-1) + label.log_prob(label.sample())
        return latent + gamma.rsample() + score[:, None]


@pytest.fixture(autouse=True)
def _validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable validation of arguments, which torch.compile disables for the whole process."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


@pytest.mark.parametrize("training", thinned([True, False], 2))
def test_samples_equal_eager(training: bool) -> None:
    torch.manual_seed(0)
    module = Samples().double().train(training).requires_grad_(training)
    options = {"check": "first" if training else "never"}
    add_tvm_dispatch(module, sample(4, 6).requires_grad_(training), options=options)
    reference = eager(module)
    for _ in range(2):
        if training:
            assert_same_step(module, reference, sample(4, 6))
            continue
        found = []
        for each in (module, reference):
            torch.manual_seed(4)
            found.append([each(sample(4, 6)), torch.get_rng_state()])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {})
    if not training:
        with pytest.raises(ValueError, match="satisfy"):
            reference(sample(4, 6) - 9)
        with pytest.raises(ValueError, match="does not satisfy its constraint"):
            module(sample(4, 6) - 9)


class Asserts(nn.Module):
    """Asserts conditions on its input and on a result, which it then writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 9).all(), "the input is too large")
        y = self.linear(x).cumsum(-1)
        largest = y.detach().abs().max()
        torch._assert_async(largest)
        largest.zero_()
        torch._assert_async(y.isfinite().all()[None], assert_msg="not finite")
        return y + largest


@pytest.mark.parametrize("training", thinned([True, False], 2))
def test_assertions_are_made_at_each_call(training: bool) -> None:
    torch.manual_seed(0)
    module = Asserts().double().train(training).requires_grad_(training)
    add_tvm_dispatch(module, sample(4, 6).requires_grad_(training))
    reference = eager(module)
    for _ in range(2):
        if training:
            assert_same_step(module, reference, sample(4, 6))
        else:
            x = sample(4, 6)
            torch.testing.assert_close(module(x), reference(x), rtol=1e-11, atol=1e-12)
    for x in (sample(4, 6) + 99, sample(4, 6) * torch.inf, sample(4, 6) - torch.inf):
        with pytest.raises(RuntimeError) as expected:
            reference(x)
        with pytest.raises(RuntimeError) as raised:
            module(x)
        assert str(raised.value) == str(expected.value)
    with torch.no_grad():
        for each in (module, reference):
            each.linear.weight.zero_()
            each.linear.bias.zero_()
            with pytest.raises(RuntimeError, match="single nonzero value, but got zero"):
                each(sample(4, 6))
    assert not dispatch_report(module).fallbacks
