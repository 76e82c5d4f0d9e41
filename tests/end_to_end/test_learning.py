"""Training with changing ``requires_grad`` flags, of modules dispatched with plain samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def _rows(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, dtype=torch.float64)


def _gan() -> tuple[nn.Module, nn.Module]:
    """Return a generator, and a discriminator with dropout."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    return generator.double(), judge.double()


def _train_gan(generator: nn.Module, judge: nn.Module, steps: int) -> list[Any]:
    """Train in turns: the discriminator, then the generator with the discriminator frozen."""
    torch.manual_seed(1)
    made_by, judged_by = (torch.optim.Adam(m.parameters(), 1e-2) for m in (generator, judge))
    seen: list[Any] = []
    for _ in range(steps):
        real, seeds = _rows(5, 6), _rows(5, 4)
        judge.requires_grad_(True)
        judged_by.zero_grad()
        loss = nn.functional.softplus(-judge(real)).mean()
        loss = loss + nn.functional.softplus(judge(generator(seeds).detach())).mean()
        loss.backward()
        judged_by.step()
        judge.requires_grad_(False)
        made_by.zero_grad()
        fooled = nn.functional.softplus(-judge(generator(seeds))).mean()
        fooled.backward()
        made_by.step()
        seen += [loss.detach(), fooled.detach(), *(p.grad for p in generator.parameters())]
    return [*seen, generator.state_dict(), judge.state_dict(), torch.get_rng_state()]


def test_a_judge_that_is_frozen_for_every_other_step(compilations: list[str]) -> None:
    plain, ours = _gan(), _gan()
    for module, width in zip(ours, (4, 6), strict=True):
        add_tvm_dispatch(module, _rows(5, width))
    assert len(compilations) == 2
    found, expected = _train_gan(*ours, steps=4), _train_gan(*plain, steps=4)
    torch.testing.assert_close(found, expected, **CLOSE)
    # One more compilation: the frozen discriminator in the generator's first step.
    assert len(compilations) == 3
    generator, judge = map(dispatch_report, ours)
    assert (generator.tvm_calls, generator.fallbacks) == (8, {})
    assert (judge.tvm_calls, judge.fallbacks) == (12, {})
    assert [len(s.gradients) for s in judge.specializations] == [1, 4]
    assert "gradients of 1 tensors in 4 calls" in str(judge)


class Block(nn.Module):
    """A transformer block as in BERT: attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = self.norms[0](x + self.dropout(attended))
        wide = nn.functional.gelu(self.first(x))
        return self.norms[1](x + self.dropout(self.second(wide)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A classifier of token sequences: an embedding, blocks, a mean, and a head."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def _fine_tune(model: Model, steps: int) -> list[Any]:
    """Train the head first, then unfreeze one more block every two steps, from the last on."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    seen: list[Any] = []
    model.requires_grad_(False)
    parts = [model.head, *reversed(model.blocks), model.embedding]
    for number in range(steps):
        if number % 2 == 0 and parts:
            parts.pop(0).requires_grad_()
        tokens, labels = torch.randint(20, (3, 5)), torch.randint(3, (3,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
    return [*seen, model.state_dict(), torch.get_rng_state()]


def _model() -> Model:
    torch.manual_seed(0)
    return Model().double().train()


@pytest.mark.slow
def test_a_model_dispatched_block_by_block_trains_as_in_eager_pytorch() -> None:
    plain, ours = _model(), _model()
    for block in ours.blocks:
        add_tvm_dispatch(block, torch.randn(3, 5, 16, dtype=torch.float64))
    torch.manual_seed(1)
    found, expected = [], []
    for model, seen in ((ours, found), (plain, expected)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randint(20, (3, 5))).square().mean()
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), *(p.grad for p in model.parameters())]
        seen += [model.state_dict(), torch.get_rng_state()]
    torch.testing.assert_close(found, expected, **CLOSE)
    for block in ours.blocks:
        report = dispatch_report(block)
        assert (report.tvm_calls, report.fallbacks) == (3, {})


@pytest.mark.slow
def test_a_model_of_which_more_and_more_learns(compilations: list[str]) -> None:
    plain, ours = _model(), _model()
    add_tvm_dispatch(ours, torch.randint(20, (3, 5)))
    found, expected = _fine_tune(ours, 10), _fine_tune(plain, 10)
    torch.testing.assert_close(found, expected, **CLOSE)
    # The last set of trained parameters is the set that dispatch compiled for.
    assert len(compilations) == 4
    report = dispatch_report(ours)
    assert (report.tvm_calls, report.fallbacks) == (10, {})
    torch.testing.assert_close(_fine_tune(ours, 10), _fine_tune(plain, 10), **CLOSE)
    assert len(compilations) == 4


@pytest.mark.slow
def test_blocks_of_a_model_of_which_more_and_more_learns() -> None:
    plain, ours = _model(), _model()
    for block in ours.blocks:
        add_tvm_dispatch(block, torch.randn(3, 5, 16, dtype=torch.float64))
    torch.testing.assert_close(_fine_tune(ours, 8), _fine_tune(plain, 8), **CLOSE)
    for block in ours.blocks:
        report = dispatch_report(block)
        assert (report.tvm_calls, report.fallbacks) == (8, {})
