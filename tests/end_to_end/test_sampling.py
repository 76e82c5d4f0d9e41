"""Models that sample from computed distributions: a language model, and an autoencoder."""

from __future__ import annotations

import torch
from torch import nn

from tests.dispatch_helpers import eager
from tests.end_to_end.steps import dispatched, gradient_errors, relative_error, training_step
from tvmbridge import add_tvm_dispatch, dispatch_report

F = nn.functional
WORDS = 50


class Sampler(nn.Module):
    """A small causal language model that appends two sampled tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            hidden = self.layer(self.embed(tokens), src_mask=mask, is_causal=True)
            logits = self.head(hidden[:, -1]) / 0.8
            chosen = torch.multinomial(torch.softmax(logits, -1), 1)
            tokens = torch.cat([tokens, chosen], 1)
        return tokens, logits


class Autoencoder(nn.Module):
    """A variational autoencoder of binary images, which returns its loss and a sampled image."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16))
        self.decode = nn.Sequential(nn.Linear(8, 48), nn.RReLU(), nn.Linear(48, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(spread))
        logits = self.decode(posterior.rsample())
        prior = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
        divergence = torch.distributions.kl_divergence(posterior, prior).sum()
        loss = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") + divergence
        return loss, torch.bernoulli(torch.sigmoid(logits)).detach()


def test_a_language_model_that_samples() -> None:
    module = Sampler().eval().requires_grad_(False)
    prompt = torch.randint(WORDS, (2, 5))
    add_tvm_dispatch(module, prompt)
    reference = eager(module)
    for seed in (1, 2):
        found = []
        for each in (module, reference):
            torch.manual_seed(seed)
            found.append((*each(prompt), torch.get_rng_state()))
        torch.testing.assert_close(*found)
    assert dispatch_report(module).tvm_calls == 2


def test_a_variational_autoencoder_trains() -> None:
    module = Autoencoder().double().train()
    x = torch.rand(4, 64, dtype=torch.float64).round()
    expected = training_step(module, x, loss=lambda outputs: outputs[0])
    with dispatched(module, x):
        step = training_step(module, x, loss=lambda outputs: outputs[0])
    assert torch.equal(step.random_state, expected.random_state)
    assert torch.equal(step.outputs[1], expected.outputs[1])
    assert relative_error(step.outputs[0], expected.outputs[0]) < 1e-12
    assert max(gradient_errors(step, expected).values()) < 1e-10
