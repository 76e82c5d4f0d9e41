"""A trained BERT with padded sentences: inference and one training step, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.end_to_end.steps import (
    Step,
    dispatched,
    gradient_errors,
    relative_error,
    training_step,
)
from tests.test_demo import with_layers
from tvmbridge.demo.minilm import (
    Batch,
    load_bert,
    load_remarks,
    load_tokenizer,
    mean_pool,
    tokenize,
)


@pytest.fixture(scope="module")
def batch() -> Batch:
    tokenized = tokenize(load_tokenizer(), load_remarks().sentences[:6])
    assert not tokenized.attention_mask.all()
    return tokenized


def learn(bert: nn.Module, batch: Batch) -> Step:
    """Run a training step on the mean of the token vectors; the pooler gets no gradient."""

    def loss(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        pooled = mean_pool(outputs[0], batch.attention_mask)
        return nn.functional.cross_entropy(pooled, torch.arange(len(pooled)))

    arguments: dict[str, Any] = {**batch.arguments}
    return training_step(bert, loss=loss, **arguments)


@pytest.mark.slow  # the demo's test compares inference with a mask too
def test_inference_with_a_mask(batch: Batch) -> None:
    bert = with_layers(2, "sdpa")
    with torch.no_grad():
        expected = bert(**batch.arguments)
        with dispatched(bert, **batch.arguments):
            result = bert(**batch.arguments)
            other = bert(input_ids=batch.input_ids, attention_mask=batch.attention_mask.flip(1))
        expected_other = bert(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.flip(1)
        )
    assert type(result) is type(expected)
    assert result.keys() == expected.keys()
    for value, reference in ((result, expected), (other, expected_other)):
        assert relative_error(value.last_hidden_state, reference.last_hidden_state) < 1e-5
        assert relative_error(value.pooler_output, reference.pooler_output) < 1e-5


@pytest.mark.slow
def test_a_training_step_in_float32_is_as_exact_as_eager(batch: Batch) -> None:
    """Compare both with float64, because six layers amplify rounding errors in eager as well."""
    exact = learn(load_bert("sdpa").double().train(), batch)
    bert = load_bert("sdpa").train()
    eager = learn(bert, batch)
    with dispatched(bert, **batch.arguments):
        step = learn(bert, batch)
    assert torch.equal(step.random_state, eager.random_state)
    assert relative_error(step.outputs[0], eager.outputs[0]) < 1e-5
    allowed = {name: 3 * e + 1e-6 for name, e in gradient_errors(eager, exact).items()}
    assert max(allowed.values()) < 1e-3, "eager itself drew other masks in float64"
    errors = gradient_errors(step, exact)
    assert {name: (e, allowed[name]) for name, e in errors.items() if not e < allowed[name]} == {}
