"""The old weight_norm and spectral_norm, which are hooks that compute a weight at each call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


class _Twice(nn.Module):
    """Calls its layer twice, so that the layer's power iteration runs twice in a call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.tanh(self.layer(x)))
        return out


def _discriminator() -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        twice = _Twice(nn.utils.spectral_norm(nn.Linear(5, 5), n_power_iterations=2))
        return nn.Sequential(
            nn.utils.spectral_norm(nn.Conv1d(3, 4, 2)),
            nn.LeakyReLU(0.2),
            nn.utils.weight_norm(nn.ConvTranspose1d(4, 3, 3), dim=1),
            twice,
        ).double()


def _state(module: nn.Module) -> list[Any]:
    """Return the buffers, and the weights that the hooks computed."""
    weights = [module.get_submodule(name).weight for name in ("0", "2", "3.layer")]
    assert all(isinstance(w, torch.Tensor) for w in weights)
    return [*module.buffers(), *weights]


def _step(module: nn.Module, x: torch.Tensor) -> list[Any]:
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    out = module(x)
    found = [out.detach(), *(s.detach().clone() for s in _state(module))]
    if torch.is_grad_enabled():
        # The computed weights can be differentiated after the call too.
        total = out.sin().sum() + module.get_submodule("2").weight.square().sum()
        leaves = [x, *module.parameters()]
        found += torch.autograd.grad(total, leaves)
    return found


@pytest.mark.parametrize("training", thinned([True, False], 2), ids=["train", "eval"])
def test_weights_state_and_gradients_are_those_of_eager_pytorch(training: bool) -> None:
    plain, module = _discriminator().train(training), _discriminator().train(training)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        add_tvm_dispatch(module, x.clone().requires_grad_(training))
        for scale in (1, 2, 3):
            torch.testing.assert_close(_step(module, x * scale), _step(plain, x * scale))
        requires = [[s.requires_grad for s in _state(m)] for m in (module, plain)]
        assert requires[0] == requires[1]
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})


def test_a_norm_that_changes_is_noticed() -> None:
    plain, module = _discriminator(), _discriminator()
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), plain(x))
        for m in (plain, module):
            ((_, hook),) = m.get_submodule("0")._forward_pre_hooks.items()
            hook.n_power_iterations = 4  # type: ignore[attr-defined]
        torch.testing.assert_close(module(x), plain(x))
        for m in (plain, module):
            m.get_submodule("0")._forward_pre_hooks.clear()
            m.get_submodule("0").weight_orig.mul_(2)
        torch.testing.assert_close(module(x), plain(x))
        nn.utils.remove_spectral_norm(module.get_submodule("3.layer"))
        nn.utils.remove_spectral_norm(plain.get_submodule("3.layer"))
        torch.testing.assert_close(module(x), plain(x))
    reasons = dispatch_report(module).fallbacks
    assert reasons["a setting of a norm of weights changed"] == 1
    assert reasons["a norm was removed"] == 1
    assert sum(reasons.values()) == 3


class _Closure(nn.Module):
    """Forward refers to the module by a closure, so the module is traced and not a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = lambda x: self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.function(x)
        return out


@pytest.mark.parametrize("everywhere", [False, True], ids=["of the module", "of every module"])
def test_hooks_of_the_module_itself_run_once(everywhere: bool) -> None:
    x, calls = torch.randn(2, 3), []
    module = nn.Linear(3, 3) if everywhere else _Closure()

    def double(module: nn.Module, args: Any, out: Any) -> Any:
        calls.append(module)
        return None if out is None else out * 2

    register: Any = module.register_forward_hook
    if everywhere:
        register = nn.modules.module.register_module_forward_hook
    handle = register(double)
    try:
        expected = module(x)
        add_tvm_dispatch(module, x)
        calls.clear()
        torch.testing.assert_close(module(x), expected)
        assert calls == [module]
    finally:
        handle.remove()
    assert dispatch_report(module).tvm_calls == 1
