"""Models of the transformers library: their collecting hooks and their caches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmbridge

transformers = pytest.importorskip("transformers")


def _bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    model: nn.Module = transformers.BertModel(config).eval()
    return model


@pytest.mark.parametrize("asked_before", [False, True])
def test_hidden_states_are_collected(asked_before: bool) -> None:
    model, ids = _bert(), torch.tensor([[3, 4, 5]])
    keywords = {"output_hidden_states": True}
    with torch.no_grad():
        expected = _bert()(ids, **keywords)
        if asked_before:
            model(ids, **keywords)
        tvmbridge.add_tvm_dispatch(model, (ids,), sample_kwargs=keywords)
        found = model(ids, **keywords)
    report = tvmbridge.dispatch_report(model)
    assert (report.tvm_calls, report.fallbacks) == (1, {})
    assert type(found) is type(expected)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)


def test_a_model_that_collects_sees_into_a_dispatched_part() -> None:
    model, ids = _bert(), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        part = model.encoder
        assert isinstance(part, nn.Module)
        states = (torch.randn(1, 3, 8), torch.zeros(1, 1, 3, 3))
        tvmbridge.add_tvm_dispatch(part, states)
        part(*states)
        found = model(ids, output_hidden_states=True)
    report = tvmbridge.dispatch_report(part)
    assert report.tvm_calls == 1
    assert report.fallbacks
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
