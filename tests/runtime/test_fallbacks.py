"""Calls that compiled code does not serve, their counted reasons, and several specializations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager, make_block, sample
from tvmbridge import add_tvm_dispatch, dispatch_report

FALLBACKS: list[tuple[str, Callable[[nn.Module], torch.Tensor]]] = [
    ("the shape of an input differs", lambda m: m(sample(5, 24))),
    ("the dtype of a parameter or buffer changed", lambda m: _mixed(m)),
    ("the training flag of a submodule changed", lambda m: _half_eval(m)),
    ("a dispatch mode is active", lambda m: _flops(m)),
    ("a submodule was replaced", lambda m: _replaced(m)),
]


def _mixed(module: nn.Module) -> torch.Tensor:
    module.outer.to(torch.float32)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError):
        module(sample().requires_grad_())
    module.outer.to(torch.float64)  # type: ignore[union-attr]
    return torch.zeros(())


def _half_eval(module: nn.Module) -> torch.Tensor:
    module.dropout.eval()  # type: ignore[union-attr]
    return module(sample().requires_grad_())  # type: ignore[no-any-return]


def _flops(module: nn.Module) -> torch.Tensor:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return module(sample())  # type: ignore[no-any-return]


def _replaced(module: nn.Module) -> torch.Tensor:
    module.inner = nn.Linear(24, 24, dtype=torch.float64)
    return module(sample().requires_grad_())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("reason", "call"), FALLBACKS, ids=[reason for reason, _ in FALLBACKS])
def test_other_calls_go_to_the_own_forward(
    trained: nn.Module, reason: str, call: Callable[[nn.Module], torch.Tensor]
) -> None:
    module = copy.deepcopy(trained)
    reference = eager(module)
    torch.manual_seed(1)
    ours = call(module)
    torch.manual_seed(1)
    if reason != "a submodule was replaced":
        torch.testing.assert_close(ours, call(reference))
    assert dispatch_report(module).fallbacks == {reason: 1}


def test_a_second_sample_adds_a_specialisation() -> None:
    module = add_tvm_dispatch(make_block().eval(), sample())
    forward = module.forward
    add_tvm_dispatch(module, sample(2, 5, 24))
    add_tvm_dispatch(module, sample())
    assert module.forward is forward
    with torch.no_grad():
        for x in (sample(), sample(2, 5, 24)):
            torch.testing.assert_close(module(x), eager(module)(x))
    report = dispatch_report(module)
    assert report.tvm_calls == 2
    assert len(report.specializations) == 2


def test_the_reason_of_the_code_that_fits_the_arguments_is_told() -> None:
    """The reported reason is that of the specialization whose argument shapes fit the call."""
    module = make_block().train()
    for shape in ((6, 24), (2, 5, 24)):
        add_tvm_dispatch(module, sample(*shape))
    module.dropout.eval()
    module(sample())
    assert dispatch_report(module).fallbacks == {"the training flag of a submodule changed": 1}
