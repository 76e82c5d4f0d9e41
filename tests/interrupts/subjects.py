"""The subjects of storms: modules whose compiled code calls PyTorch's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.dispatch_helpers import eager
from tests.interrupts.storm import Subject
from tvmbridge import add_tvm_dispatch, compile_report, dispatch_report


class Net(nn.Module):
    """A matrix product, a norm, and operators for which compiled code calls PyTorch's kernels.

    Args:
        norm: the norm after the product.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(16, 32), norm, nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.cumprod(torch.tanh(self.norm(self.inner(x))), dim=1)
        ordered = torch.sort(hidden, dim=-1).values
        result: torch.Tensor = self.outer(ordered)
        return result


def net(norm: nn.Module | None = None) -> Net:
    """Return the network, with the same parameters at each call."""
    torch.manual_seed(0)
    return Net(norm or nn.LayerNorm(32))


def sample() -> torch.Tensor:
    """Return an input, with the same numbers at each call."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def train(module: Any, x: torch.Tensor) -> None:
    """Run one forward and backward."""
    for parameter in module.parameters():
        parameter.grad = None
    module(x).square().sum().backward()


def assert_calls_kernels(module: nn.Module) -> None:
    """Assert that compiled code of ``module`` has served calls, and calls PyTorch's kernels."""
    report = dispatch_report(module)
    assert report.tvm_calls, report
    assert not report.fallbacks, report
    assert all(s.kernels.external for s in report.specializations), report


def assert_same_inference(module: Callable[..., Any], reference: nn.Module) -> None:
    """Assert that ``module`` returns the same result as ``reference``."""
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), reference(sample()), rtol=1e-4, atol=1e-5)


def assert_same_training(module: Any, reference: nn.Module) -> None:
    """Assert that a training step of both modules agrees, from the same state."""
    reference.load_state_dict(getattr(module, "_orig_mod", module).state_dict())
    train(module, sample())
    train(reference, sample())
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    for a, b in zip(module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@contextmanager
def inference() -> Iterator[Subject]:
    """Inference with autograd enabled: the calls of PyTorch's kernels turn autograd off."""
    module, x = net().eval().requires_grad_(False), sample()
    reference = eager(module)
    add_tvm_dispatch(module, x)
    module(x)
    assert_calls_kernels(module)
    yield Subject(lambda: module(x), lambda: assert_same_inference(module, reference))
    assert_calls_kernels(module)


@contextmanager
def training() -> Iterator[Subject]:
    """Training steps of forward and backward."""
    module, x = net().train(), sample()
    reference = eager(module)
    add_tvm_dispatch(module, x)
    train(module, x)
    assert_calls_kernels(module)
    yield Subject(lambda: train(module, x), lambda: assert_same_training(module, reference))
    assert_calls_kernels(module)


@contextmanager
def batch_norm() -> Iterator[Subject]:
    """Training steps with running statistics, which a step must write once or not at all."""
    module, x = net(nn.BatchNorm1d(32)).train(), sample()
    reference = eager(module)
    add_tvm_dispatch(module, x)
    train(module, x)
    assert_calls_kernels(module)
    counter = module.norm.num_batches_tracked
    finished = int(counter)  # type: ignore[arg-type]

    def step() -> None:
        nonlocal finished
        train(module, x)
        finished += 1

    def after() -> None:
        nonlocal finished
        assert int(counter) - finished in (0, 1), (int(counter), finished)  # type: ignore[arg-type]
        finished = int(counter)  # type: ignore[arg-type]

    def check() -> None:
        nonlocal finished
        assert_same_training(module, reference)
        finished = int(counter)  # type: ignore[arg-type]

    yield Subject(step, check, after)
    assert_calls_kernels(module)


@contextmanager
def threads() -> Iterator[Subject]:
    """Calls of one module in eight threads; the interrupts arrive in the main thread."""
    module, x = net().train(), sample()
    reference = eager(module)
    add_tvm_dispatch(module, x)
    train(module, x)
    with torch.no_grad():
        module(x)
        expected = reference(x)
    assert_calls_kernels(module)
    ended, faults = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not ended.is_set():
                found = module(x)
                torch.autograd.grad(found.sum(), module.inner.weight)
                torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=work) for _ in range(7)]
    for worker in workers:
        worker.start()
    try:
        yield Subject(lambda: module(x), lambda: assert_same_inference(module, reference))
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    assert not faults, faults
    assert_calls_kernels(module)


@contextmanager
def compile_door() -> Iterator[Subject]:
    """Training steps of a module compiled by torch.compile with the backend ``tvmbridge``."""
    module, x = net().train(), sample()
    reference = eager(module)
    compiled = torch.compile(module, backend="tvmbridge")
    train(compiled, x)
    train(compiled, x)
    yield Subject(lambda: train(compiled, x), lambda: assert_same_training(compiled, reference))
    # Dynamo compiles again if an interrupt stops its evaluation of guards.
    graphs = compile_report().graphs
    assert any(graph.calls for graph in graphs)
    assert all(graph.whole for graph in graphs), graphs
    dispatches = [dispatch for graph in graphs for dispatch in graph.dispatches]
    assert all(s.kernels.external for d in dispatches for s in d.specializations), dispatches


SUBJECTS = {
    "inference": inference,
    "training": training,
    "batch-norm": batch_norm,
    "threads": threads,
    "torch.compile": compile_door,
}
