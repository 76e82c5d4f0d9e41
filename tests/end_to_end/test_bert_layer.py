"""A BertLayer of BERT-base trains through TVM: a seed gives eager's outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.end_to_end.steps import (
    base_layer,
    dispatched,
    gradient_errors,
    relative_error,
    training_step,
)

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}


class BothStages(nn.Module):
    """A BertLayer that also returns the output of its attention."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layer
        attended = layer.attention(hidden)[0]
        return attended, layer.feed_forward_chunk(attended)


def check(module: nn.Module, dtype: torch.dtype, *shape: int) -> None:
    hidden = torch.randn(shape, dtype=torch.float64).to(dtype)
    reference = training_step(module, hidden, seed=3)
    with dispatched(module, hidden):
        step, again, other = (training_step(module, hidden, seed=s) for s in (3, 3, 2))
    # Another seed draws other masks.
    assert torch.equal(step.outputs[0], again.outputs[0])
    assert not torch.allclose(step.outputs[0], other.outputs[0])
    assert torch.equal(step.random_state, reference.random_state)
    bound = BOUNDS[dtype]
    for output, expected in zip(step.outputs, reference.outputs, strict=True):
        assert output.dtype is dtype
        assert relative_error(output, expected) < bound
    errors = gradient_errors(step, reference)
    assert len(errors) == 1 + len(list(module.parameters()))
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_a_training_step_is_that_of_eager() -> None:
    check(base_layer("sdpa", width=128), torch.float32, 2, 24, 128)


@pytest.mark.slow
def test_a_step_of_bert_bases_width_is_that_of_eager() -> None:
    check(base_layer("eager", torch.float64), torch.float64, 2, 128, 768)


@pytest.mark.slow
def test_a_tuple_of_outputs() -> None:
    layer = base_layer("sdpa", torch.float64, width=128)
    check(BothStages(layer), torch.float64, 2, 24, 128)
