"""LayerDrop: each layer's random draw is made, also if its probability is 0 or 1."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import CaptureError

Form = Callable[[Any, torch.Tensor], bool]


def _bart(m: Any, draw: torch.Tensor) -> bool:
    return bool(m.training and draw < m.layerdrop)


def _wav2vec2(m: Any, draw: torch.Tensor) -> bool:
    skip = m.training and draw < m.layerdrop
    return not (not skip or False)


FORMS: dict[str, Form] = {
    "below": _bart,
    "negated": _wav2vec2,
    "number first": lambda m, draw: bool(m.layerdrop > draw),
    "not above": lambda m, draw: not torch.ge(draw, m.layerdrop),
    "keyword": lambda m, draw: bool(torch.less(draw, other=m.layerdrop)),
}


class Layers(nn.Module):
    """Layers that are skipped at random, and dropout that draws from the same generator."""

    def __init__(self, layerdrop: float, *skips: Form) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.skips = skips
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in skips)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, skips in zip(self.layers, self.skips, strict=True):
            draw = torch.rand([])
            if skips(self, draw):
                continue
            x = x + nn.functional.dropout(layer(x), 0.5, self.training)
        return x


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)


def _step(module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(5)
    out = module(_x())
    gradients = torch.autograd.grad(out.square().sum(), list(module.parameters()))
    return [out.detach(), *gradients, torch.get_rng_state()]


def test_layers_are_kept_with_probability_one() -> None:
    plain = Layers(0.0, *FORMS.values()).train()
    module = add_tvm_dispatch(copy.deepcopy(plain), _x())
    torch.testing.assert_close(_step(module), _step(plain))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {})
    module.layerdrop = 0.5
    module(_x())
    assert dispatch_report(module).fallbacks == {"the attribute layerdrop changed": 1}


def test_layers_are_skipped_with_probability_one() -> None:
    plain = Layers(1.0, lambda m, draw: bool(draw < m.layerdrop)).eval()
    module = add_tvm_dispatch(copy.deepcopy(plain), _x())
    x = _x()
    torch.manual_seed(1)
    assert torch.equal(module(x), x)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    plain(x)
    assert torch.equal(state, torch.get_rng_state())
    assert dispatch_report(module).tvm_calls == 1


def _written(m: Any, draw: torch.Tensor) -> bool:
    draw.view(1).sub_(2)
    return bool(draw < 0)


DECIDED: dict[str, tuple[float, Form, str]] = {
    "between": (0.1, _bart, "a random draw decides.*LayerDrop.*test_uniforms"),
    "negated": (0.1, _wav2vec2, "a random draw decides"),
    "at zero": (0.0, lambda m, draw: bool(draw <= m.layerdrop), "a random draw decides"),
    "tensor": (0.0, lambda m, draw: bool(draw < torch.zeros([])), "a random draw decides"),
    "not a number": (float("nan"), _bart, "a random draw decides"),
    "written": (0.0, _written, "branches by the value of a tensor.*_written"),
    "scaled": (1.0, lambda m, draw: bool(draw * 2 < m.layerdrop), "data-dependent"),
    "outcome written": (0.0, lambda m, d: bool((d < 0).logical_not_()), "data-dependent"),
}


@pytest.mark.parametrize("kind", DECIDED)
def test_what_a_draw_decides_is_refused(kind: str) -> None:
    layerdrop, skips, reason = DECIDED[kind]
    with pytest.raises(CaptureError, match=reason):
        add_tvm_dispatch(Layers(layerdrop, skips).train(), _x(), on_break="forward")
