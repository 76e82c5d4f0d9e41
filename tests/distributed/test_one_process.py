"""A pipeline of one process, which has all stages itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import (
    Images,
    Language,
    cross_entropy,
    reference_steps,
    tokens,
)
from tests.distributed.scripts import images, sgd
from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed import load_checkpoint, pipeline, save_checkpoint
from tvmbridge.distributed.stage import seed_of


@pytest.fixture(autouse=True)
def _no_group_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def made(model: nn.Module, inputs: Any, **settings: Any) -> Any:
    settings = {"microbatches": 4, "stages": 2, "loss": cross_entropy, "tvm": False} | settings
    return pipeline(model, inputs, timeout=20, **settings)


@pytest.mark.parametrize(
    "schedule", [pytest.param("simple", marks=pytest.mark.slow), "interleaved"]
)
def test_gradients_add_up_over_steps_and_are_clipped_as_one(schedule: str) -> None:
    torch.manual_seed(0)
    model, reference = Language(tied=True).double(), Language(tied=True).double()
    reference.load_state_dict(model.state_dict())
    inputs, targets = tokens()
    runner = made(model, inputs, schedule=schedule)
    for _ in range(2):
        runner.step(inputs, targets)
    norm = runner.clip_grad_norm_(0.1)
    for _ in range(2):
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (cross_entropy(reference(x), y) / 4).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert norm == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in runner.named_parameters():
        wanted = reference.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        next(runner.parameters()).grad.fill_(torch.nan)
    runner.clip_grad_norm_(0.1)
    # Like torch.nn.utils.clip_grad_norm_: one NaN makes all gradients NaN.
    assert all(p.grad.isnan().all() for p in runner.parameters())
    runner.zero_grad()
    assert all(p.grad is None for p in runner.parameters())


@pytest.mark.parametrize(
    "schedule", [pytest.param("simple", marks=pytest.mark.slow), "interleaved"]
)
def test_running_statistics_are_those_of_one_process(schedule: str) -> None:
    torch.manual_seed(0)
    model, reference = Images().double(), Images().double()
    reference.load_state_dict(model.state_dict())
    inputs, targets = images()
    runner = made(model, inputs, schedule=schedule, stages=3)
    optimizer = sgd(runner.parameters())
    for _ in range(2):
        losses = runner.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
    expected = reference_steps(reference, cross_entropy, [(inputs, targets)] * 2, 4, sgd)
    torch.testing.assert_close(losses, expected[4:], rtol=1e-12, atol=1e-12)
    for name, tensor in runner.full_state_dict().items():
        wanted = reference.state_dict()[name]
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


def test_draws_differ_by_microbatch_and_are_repeatable_by_seed() -> None:
    inputs, targets = tokens(8)
    inputs, targets = inputs[:1].expand(8, -1), targets[:1].expand(8, -1)

    def losses(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        state = torch.get_rng_state()
        runner = made(Language(dropout=0.5).double().train(), inputs, seed=seed)
        found = torch.cat([runner.step(inputs, targets) for _ in range(2)])
        torch.manual_seed(0)
        assert torch.equal(state, torch.get_rng_state())
        return found

    first = losses(7)
    # The rows are equal in each micro-batch and step, so losses differ by random draws alone.
    assert len(set(first.tolist())) == 8
    assert torch.equal(first, losses(7))
    assert not torch.equal(first, losses(8))


def test_a_step_leaves_the_processs_generator_alone() -> None:
    inputs, targets = tokens()
    runner = made(Language(dropout=0.5).train(), inputs)
    before = torch.get_rng_state()
    runner.step(inputs, targets)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_of_neighbours_differ() -> None:
    seeds = {seed_of(0, s, m, i) for s in range(20) for m in range(16) for i in range(8)}
    assert len(seeds) == 20 * 16 * 8
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_checkpoint_is_read_by_other_stages_and_by_the_module(tmp_path: Any) -> None:
    torch.manual_seed(0)
    inputs, targets = tokens()

    def steps(runner: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        losses = runner.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    first = made(Language(tied=True).double(), inputs, stages=2)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
    for _ in range(2):
        steps(first, optimizer)
    save_checkpoint(first, tmp_path / "at2", optimizer)
    save_checkpoint(first, tmp_path / "at2", optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["at2"]

    second = made(Language(tied=True).double(), inputs, stages=3)
    other = torch.optim.AdamW(second.parameters(), lr=0.01)
    load_checkpoint(second, tmp_path / "at2", other)
    assert torch.equal(steps(first, optimizer), steps(second, other))
    for a, b in zip(first.parameters(), second.parameters(), strict=False):
        assert a.shape == b.shape
    whole = second.full_state_dict()
    for name, tensor in first.full_state_dict().items():
        assert torch.equal(tensor, whole[name]), name

    plain = Language(tied=True).double()
    torch.distributed.checkpoint.load(
        {"model": plain.state_dict()}, checkpoint_id=str(tmp_path / "at2")
    )
    third = made(plain, inputs, stages=1)
    load_checkpoint(third, tmp_path / "at2")
    assert torch.equal(plain.embedding.weight, third.full_state_dict()["embedding.weight"])
    with pytest.raises(PipelineError, match="the checkpoint cannot be loaded"):
        load_checkpoint(third, tmp_path / "nowhere")


def test_a_frozen_stage_and_an_unused_layer() -> None:
    torch.manual_seed(0)
    model, reference = Language().double(), Language().double()
    for module in (model, reference):
        module.unused = nn.Linear(2, 2)
        module.embedding.requires_grad_(False)
        module.blocks[0].requires_grad_(False)
    reference.load_state_dict(model.state_dict())
    inputs, targets = tokens()
    runner = made(model, inputs, stages=["blocks.1"])
    losses = runner.step(inputs, targets)
    expected = reference_steps(
        reference, cross_entropy, [(inputs, targets)], 4, lambda p: torch.optim.SGD(p, lr=0.0)
    )
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    assert list(runner.full_state_dict()) == list(reference.state_dict())
    assert model.embedding.weight.grad is None


def test_the_module_may_return_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Language()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.model(inputs), labels)

    inputs, labels = tokens()
    model = WithLoss().double()
    runner = made(model, {"inputs": inputs, "labels": labels}, loss=None)
    losses = runner.step({"inputs": inputs, "labels": labels})
    expected = [model(x, y) for x, y in zip(inputs.chunk(4), labels.chunk(4), strict=True)]
    torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(PipelineError, match="the loss must be a tensor of one element"):
        made(Language(), inputs, loss=None).step(inputs)


def test_a_step_is_profiled() -> None:
    inputs, targets = tokens()
    runner = made(Language().train(), inputs, schedule="simple")
    runner.step(inputs, targets, profile=True)
    works = [str(s.work) for s in runner.measured.spans[0]]
    assert works[:4] == ["F0.0", "F0.1", "F0.2", "F0.3"]
    assert len(works) == 16
    assert 0 < runner.measured.idle < 1


def test_other_calls_than_the_samples_are_refused() -> None:
    inputs, targets = tokens()
    runner = made(Language().train(), inputs)
    for wrong, text in (
        (inputs[:, :3], "was made for torch.int64"),
        ((inputs, inputs), "another structure"),
        (inputs.to(torch.int32), "torch.int32"),
    ):
        with pytest.raises(PipelineError, match=text):
            runner.step(wrong, targets)
    runner.step(inputs, targets)


def test_devices_are_one_a_rank() -> None:
    with pytest.raises(PipelineError, match="2 devices for 1 ranks: each rank runs one"):
        made(Language().train(), tokens()[0], devices=["cpu", "cpu"])
