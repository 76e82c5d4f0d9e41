"""transformers' BertLayer on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gpu.helpers import GPU, STEPS, assert_same, check, gradients, pair, replays, result_of
from tests.models import bert_layer

pytestmark = GPU


def _layer(dropout: float = 0.0) -> nn.Module:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    return bert_layer(width=64, heads=4, intermediate_size=160, **rates)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_dropout(dtype: torch.dtype, train: bool) -> None:
    check(_layer, (torch.randn(2, 19, 64),), dtype, train=train)


def test_dropout_outside_of_attention_is_that_of_the_seed() -> None:
    # In float64 rounding errors stay far below the effect of a wrong dropout mask.
    x = torch.randn(2, 19, 64, device="cuda", dtype=torch.float64)
    tvm, eager = pair(lambda: _layer(0.1).double(), x)
    for step in range(STEPS):
        found = []
        for module in (tvm, eager):
            module.zero_grad()
            torch.manual_seed(step)
            output = result_of(module(x + step))
            output.square().sum().backward()
            state = torch.cuda.get_rng_state()
            found.append(({"output": output.detach()} | gradients(module), state))
        (values, state), (expected, expected_state) = found
        assert_same(values, expected)
        assert torch.equal(state, expected_state)
    assert replays(tvm) > 0
