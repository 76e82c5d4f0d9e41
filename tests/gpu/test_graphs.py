"""CUDA graphs in training loops of all kinds: each step equals eager PyTorch's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.gpu.helpers import (
    GPU,
    STEPS,
    Values,
    assert_same,
    batch,
    gradients,
    pair,
    replays,
    skips,
    small,
    with_dropout,
)
from tvmbridge import add_tvm_dispatch

pytestmark = GPU

Step = Callable[[nn.Module, int], Values]


def _assert_steps(
    step: Step, make: Callable[[], nn.Module] = small, *, train: bool = True
) -> nn.Module:
    """Assert that steps through TVM equal eager's from the same seeds; return the TVM module."""
    tvm, eager = pair(make, batch(), train=train)
    for number in range(STEPS):
        values = []
        for module in (tvm, eager):
            torch.manual_seed(number)
            values.append(step(module, number))
        assert_same(*values)
    assert replays(tvm) > 0
    return tvm


def _descend(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=1e-4)


class _Places(nn.Module):
    """Looks up rows at places that forward makes itself: they are constants of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.table = nn.Embedding(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(8, 512, 4, dtype=torch.long, device=x.device)
        return self.inner(x).mean() + self.table(places[..., 1] + 3).pow(2).mean()


def test_constants_that_backward_reads() -> None:
    def step(module: nn.Module, number: int) -> Values:
        module.zero_grad()
        output = module(batch(number))
        output.backward()
        return {"output": output.detach(), **gradients(module)}

    _assert_steps(step, _Places)


def test_inference() -> None:
    def step(module: nn.Module, number: int) -> Values:
        with torch.no_grad():
            return {"output": module(batch(number))}

    tvm = _assert_steps(step, train=False)
    assert skips(tvm) == {}


def test_training() -> None:
    def step(module: nn.Module, number: int) -> Values:
        module.zero_grad()
        output = module(batch(number))
        output.square().sum().backward()
        _descend(module)
        return {"output": output.detach()} | gradients(module)

    tvm = _assert_steps(step)
    assert skips(tvm) == {}


@pytest.mark.parametrize("train", [False, True])
def test_outputs_of_earlier_calls_stay(train: bool) -> None:
    tvm, eager = pair(small, batch(), train=train)
    held = []
    for number in range(STEPS):
        with torch.set_grad_enabled(train):
            output = tvm(batch(number))
        if train:
            output.sum().backward()
        held.append(output.detach())
    for number, output in enumerate(held):
        assert_same({"output": output}, {"output": eager(batch(number)).detach()})
    assert replays(tvm) > 0


def test_forward_twice_before_backward() -> None:
    def step(module: nn.Module, number: int) -> Values:
        module.zero_grad()
        first, second = module(batch(number)), module(batch(number + 100))
        (first.square().sum() + second.sum()).backward()
        return {"first": first.detach(), "second": second.detach()} | gradients(module)

    tvm = _assert_steps(step)
    assert skips(tvm)["the backward of an earlier call has not run"] > 0


def test_forward_whose_backward_never_runs() -> None:
    held: list[torch.Tensor] = []

    def step(module: nn.Module, number: int) -> Values:
        module.zero_grad()
        held.append(module(batch(number + 100)))  # its autograd graph stays alive
        output = module(batch(number))
        output.square().sum().backward()
        if number % 2:
            held.clear()
        return {"output": output.detach()} | gradients(module)

    _assert_steps(step)


def test_gradients_accumulate() -> None:
    def step(module: nn.Module, number: int) -> Values:
        if number % 3 == 0:
            module.zero_grad(set_to_none=number % 2 == 0)
        module(batch(number)).square().sum().backward()
        return gradients(module)

    _assert_steps(step)


def test_retain_graph() -> None:
    def step(module: nn.Module, number: int) -> Values:
        module.zero_grad()
        output = module(batch(number))
        output.square().sum().backward(retain_graph=True)
        output.sum().backward()
        return gradients(module)

    _assert_steps(step)


def test_a_retained_backward_after_later_calls() -> None:
    def step(module: nn.Module, number: int) -> Values:
        module.zero_grad()
        output = module(batch(number))
        output.square().sum().backward(retain_graph=True)
        module(batch(number + 100)).sum().backward()
        output.sum().backward()
        return gradients(module)

    _assert_steps(step)


def test_gradients_that_are_held_over_steps() -> None:
    tvm, eager = pair(small, batch())
    held: list[list[Values]] = [[], []]
    for number in range(STEPS):
        for module, kept in zip((tvm, eager), held, strict=True):
            x = batch(number).requires_grad_()
            given = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
            kept.append({str(i): g for i, g in enumerate(given)})
    for found, expected in zip(*held, strict=True):
        assert_same(found, expected)
    assert replays(tvm) > 0


def test_hooks_that_keep_gradients() -> None:
    kept: dict[nn.Module, list[Values]] = {}

    def step(module: nn.Module, number: int) -> Values:
        if module not in kept:
            seen: list[Values] = []
            kept[module] = seen
            for name, p in module.named_parameters():
                p.register_hook(lambda g, name=name, seen=seen: seen.append({name: g}))
        module.zero_grad()
        module(batch(number)).square().sum().backward()
        return gradients(module)

    _assert_steps(step)
    merged = []
    for seen in kept.values():
        # Within a step hooks may run in any order; each parameter's hooks follow the steps.
        by_name: dict[str, list[torch.Tensor]] = {}
        for one in seen:
            for name, g in one.items():
                by_name.setdefault(name, []).append(g)
        merged.append({f"{n} {i}": g for n, all_ in by_name.items() for i, g in enumerate(all_)})
    assert len(merged[0]) == STEPS * len(list(small().parameters()))
    assert_same(*merged)


def test_a_batch_that_learns() -> None:
    def step(module: nn.Module, number: int) -> Values:
        x = batch(number).requires_grad_()
        module.zero_grad()
        module(x).square().sum().backward()
        assert x.grad is not None
        return {"input": x.grad} | gradients(module)

    _assert_steps(step)


def test_dropout_differs_from_call_to_call_and_follows_the_seed() -> None:
    tvm, eager = pair(with_dropout, batch())
    outputs: list[list[torch.Tensor]] = [[], []]
    states = []
    for module, seen in zip((tvm, eager), outputs, strict=True):
        torch.manual_seed(5)
        for _ in range(STEPS):
            module.zero_grad()
            output = module(batch())
            output.square().sum().backward()
            seen.append(output.detach())
        states.append((torch.cuda.get_rng_state(), gradients(module)))
    for number, (found, expected) in enumerate(zip(*outputs, strict=True)):
        assert_same({"output": found}, {"output": expected})
        assert torch.equal(found == 0, expected == 0)
        if number:
            assert not torch.equal(found, outputs[0][number - 1])
    assert torch.equal(states[0][0], states[1][0])
    assert_same(states[0][1], states[1][1])
    assert replays(tvm) > 0


def test_without_graphs() -> None:
    tvm, eager = pair(small, batch(), cuda_graphs=False)
    for number in range(STEPS):
        values = []
        for module in (tvm, eager):
            module.zero_grad()
            module(batch(number)).square().sum().backward()
            values.append(gradients(module))
        assert_same(*values)
    assert replays(tvm) == 0
    assert skips(tvm) == {}


class LossAndLogits(nn.Module):
    """A module that returns loss and logits, like transformers' models; only the loss is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layers(x)
        return nn.functional.cross_entropy(logits, labels), logits


def loss_and_logits() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Return a dispatched module, its reference in float64, and labels."""
    module = LossAndLogits().cuda()
    reference = copy.deepcopy(module).double()
    labels = torch.randint(0, 10, (16,), device="cuda")
    add_tvm_dispatch(module, (torch.randn(16, 32, device="cuda"), labels))
    return module, reference, labels


def test_a_backward_without_some_cotangents_is_replayed() -> None:
    module, reference, labels = loss_and_logits()
    for _ in range(9):
        x = torch.randn(16, 32, device="cuda")
        found = torch.autograd.grad(module(x, labels)[0], list(module.parameters()))
        expected = torch.autograd.grad(
            reference(x.double(), labels)[0], list(reference.parameters())
        )
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-6)
    ((_, entry),) = module.forward.code.kept.known[0].compiled()
    assert entry.graph_replays["backward"] > 0


def _bytes_of_graphs() -> int:
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if s["segment_pool_id"] != (0, 0))


def test_gradients_are_computed_where_residuals_were() -> None:
    gc.collect()
    before = _bytes_of_graphs()
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    module = nn.Sequential(*layers).cuda()
    x = torch.randn(2048, 2048, device="cuda")
    add_tvm_dispatch(module, (x,))
    of_forward = 0
    while replays(module) < 2:
        output = module(x)
        of_forward = of_forward or _bytes_of_graphs() - before
        output.sum().backward()
        module.zero_grad()
    # The gradients of weights and biases have 96 MiB.
    assert _bytes_of_graphs() - before - of_forward < 64 * 2**20


def test_partial_backwards_beside_whole_ones() -> None:
    """Alternate both, so that a graph of a partial backward is captured after the whole one."""
    module, reference, labels = loss_and_logits()
    for number in range(16):
        x, found = torch.randn(16, 32, device="cuda"), []
        for each, given in ((module, x), (reference, x.double())):
            loss, logits = each(given, labels)
            total = loss + logits.square().sum() if number % 2 or number > 11 else loss
            found.append(torch.autograd.grad(total, list(each.parameters())))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)
