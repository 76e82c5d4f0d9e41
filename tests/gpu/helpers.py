"""Compare steps of a module on the GPU through TVM with steps in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# The first call checks all guards, and two more calls precede the capture of a CUDA graph. The
# remaining calls replay the graph.
STEPS = 8

Values = dict[str, torch.Tensor]


def result_of(output: Any) -> torch.Tensor:
    """Return the output, or its first element if it is a tuple."""
    return output[0] if isinstance(output, tuple) else output


def small() -> nn.Module:
    """Return a network of linear layers, an activation and a norm."""
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64))


def with_dropout() -> nn.Module:
    """Return a network with two dropouts."""
    parts = nn.Linear(64, 96), nn.Dropout(0.1), nn.ReLU(), nn.Linear(96, 64), nn.Dropout(0.3)
    return nn.Sequential(*parts)


def pair(
    make: Callable[[], nn.Module], x: torch.Tensor, *, train: bool = True, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a dispatched module and its eager reference, with equal weights."""
    torch.manual_seed(0)
    eager = make().train(train).to(x.device)
    tvm = copy.deepcopy(eager)
    with torch.set_grad_enabled(train):
        add_tvm_dispatch(tvm, x.detach().clone(), options=options)
    return tvm, eager


def batch(step: int = 0) -> torch.Tensor:
    """Return the input of a step."""
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(32, 64, device="cuda", generator=generator)


def replays(module: nn.Module) -> int:
    """Return the number of CUDA graph replays; assert that no call fell back to eager."""
    report = dispatch_report(module)
    assert not report.fallbacks, report.fallbacks
    return sum(s.graph_replays for s in report.specializations)


def skips(module: nn.Module) -> dict[str, int]:
    """Return the number of calls without a CUDA graph, by reason."""
    found: dict[str, int] = {}
    for s in dispatch_report(module).specializations:
        for reason, count in s.graph_skips.items():
            found[reason] = found.get(reason, 0) + count
    return found


def gradients(module: nn.Module) -> Values:
    """Return copies of the gradients of all parameters."""
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that values are equal up to float32 rounding, by :func:`errors`."""
    assert found.keys() == expected.keys()
    for name, error in errors(found, expected).items():
        assert error < 1e-5, (name, error)


def errors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the norm of each difference over the norm of the expected value.

    A small norm is replaced by a hundredth of the largest norm.
    """
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    floor = max(1e-2 * max(norms.values()), 1e-30)
    return {
        name: float((found[name].double() - value.double()).norm()) / max(norms[name], floor)
        for name, value in expected.items()
    }


def step_values(
    module: nn.Module, args: tuple[torch.Tensor, ...], rounded: torch.dtype, *, train: bool
) -> tuple[Values, Values]:
    """Run a step; return the output with the buffers, and all gradients.

    The cotangent is rounded to ``rounded``, so that it is the same for modules of any dtype.
    """
    module.zero_grad(set_to_none=True)
    inputs = [a.detach().clone().requires_grad_(train and a.is_floating_point()) for a in args]
    torch.manual_seed(1)
    with torch.set_grad_enabled(train):
        result = result_of(module(*inputs))
    forward = {"output": result.detach().clone()}
    if train:
        generator = torch.Generator("cuda").manual_seed(2)
        shape = result.shape
        cotangent = torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator)
        result.backward(cotangent.to(rounded).to(result.dtype))
    forward |= {n: b.clone() for n, b in module.named_buffers() if b.is_floating_point()}
    given = {f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    return forward, given | gradients(module)


def check(
    make: Callable[[], nn.Module],
    args: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    *,
    train: bool = True,
) -> None:
    """Compare the first and the last step of a module through TVM with eager PyTorch.

    In float64 the values must be equal up to rounding. In other dtypes the error against float64
    may be at most twice eager's error.
    """
    torch.manual_seed(0)
    eager = make().train(train).to("cuda", dtype)
    exact, tvm = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    given = tuple(a.to("cuda", dtype) if a.is_floating_point() else a.cuda() for a in args)
    doubled = tuple(a.double() if a.is_floating_point() else a for a in given)
    learning = (a.clone().requires_grad_(train and a.is_floating_point()) for a in given)
    with torch.set_grad_enabled(train):
        add_tvm_dispatch(tvm, tuple(learning))
    for step in range(STEPS):
        found = step_values(tvm, given, dtype, train=train)
        expected = step_values(eager, given, dtype, train=train)
        truth = step_values(exact, doubled, dtype, train=train)
        if step in (0, STEPS - 1):
            for values in zip(found, expected, truth, strict=True):
                _assert_close(*values, dtype, step)
    assert not dispatch_report(tvm).fallbacks, dispatch_report(tvm).fallbacks


def _assert_close(
    found: Values, expected: Values, truth: Values, dtype: torch.dtype, step: int
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
    if not expected:
        return
    if dtype is torch.float64:
        for name, error in errors(found, expected).items():
            assert error < 1e-12, (step, name, error)
        return
    floor = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 0.01)
    of_eager = errors(expected, truth)
    for name, error in errors(found, truth).items():
        assert error <= 2 * of_eager[name] + floor, (step, name, error, of_eager[name])
