"""Models of transformers: the hooks that collect outputs, and the caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tests.models import bert_model
from tests.thinned import thinned

transformers = pytest.importorskip("transformers")


def _bert() -> nn.Module:
    torch.manual_seed(0)
    return bert_model(width=8, vocab_size=20, max_position_embeddings=8).eval()


@pytest.mark.parametrize("asked_before", thinned([True, False], 2))
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


class Counts(nn.Module):
    """Write results into the batch and return the batch, as sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: Any) -> Any:
        batch["sums"] = self.linear(batch["x"]) + batch.get("more", 0.0)
        return batch


def _batch(x: torch.Tensor, encodings: list[Any] | None = None) -> Any:
    return transformers.BatchEncoding({"x": x}, encoding=encodings, n_sequences=1)


def test_batches_of_tokenizers_are_served_and_stay_what_they_are() -> None:
    module = Counts().eval()
    tvmbridge.add_tvm_dispatch(module)
    for value in range(3):
        account = [object()]
        x = torch.full((2, 3), float(value))
        given = _batch(x, account)
        with torch.no_grad():
            found = module(given)
            expected = module.linear(x)
        assert found is given
        assert list(found) == ["x", "sums"]
        assert found["x"] is x
        assert found.encodings is account
        torch.testing.assert_close(found["sums"], expected)
    report = tvmbridge.dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})


def test_a_message_names_the_tensor_in_a_batch() -> None:
    module = Counts().eval()
    tvmbridge.add_tvm_dispatch(module, (_batch(torch.ones(2, 3)),))
    module(_batch(torch.ones(4, 3)))
    (example,) = tvmbridge.dispatch_report(module).examples.values()
    assert example == "argument `batch['x']`: shape (4, 3), compiled for (2, 3)"


class AsksTheTokenizer(Counts):
    """Read a value from the batch that is no tensor and differs at each call."""

    def forward(self, batch: Any) -> Any:
        return self.linear(batch["x"]) * len(batch.encodings)


def test_what_a_tokenizer_says_of_a_text_is_never_taken_from_the_sample() -> None:
    module = AsksTheTokenizer().eval()
    tvmbridge.add_tvm_dispatch(module)
    x = torch.ones(2, 3)
    for encodings in ([object()], [object(), object()]):
        expected = module.linear(x) * len(encodings)
        torch.testing.assert_close(module(_batch(x, encodings)), expected)
    report = tvmbridge.dispatch_report(module)
    assert report.tvm_calls == 0
    assert "UNSEEN" in next(iter(report.fallbacks)) or "Unseen" in next(iter(report.fallbacks))


def test_features_of_processors_are_served() -> None:
    module = Counts().eval()
    tvmbridge.add_tvm_dispatch(module)
    given = transformers.BatchFeature({"x": torch.ones(2, 3), "more": torch.ones(2, 2)})
    with torch.no_grad():
        found = module(given)
        expected = module.linear(torch.ones(2, 3)) + 1
    assert found is given
    torch.testing.assert_close(found["sums"], expected)
    assert tvmbridge.dispatch_report(module).tvm_calls == 1
