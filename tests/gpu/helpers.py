"""Steps of a module on the GPU, in eager PyTorch and through TVM, and how far apart they are."""

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
# The full guards serve the first call, two more run before a capture: the last ones are replayed.
STEPS = 8

Values = dict[str, torch.Tensor]


def result_of(output: Any) -> torch.Tensor:
    """The tensor, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


def small() -> nn.Module:
    """A network with products, an activation and a norm."""
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64))


def with_dropout() -> nn.Module:
    """A network whose calls draw two masks."""
    parts = nn.Linear(64, 96), nn.Dropout(0.1), nn.ReLU(), nn.Linear(96, 64), nn.Dropout(0.3)
    return nn.Sequential(*parts)


def pair(
    make: Callable[[], nn.Module], x: torch.Tensor, *, train: bool = True, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """The module through TVM, and the same in eager PyTorch."""
    torch.manual_seed(0)
    eager = make().train(train).to(x.device)
    tvm = copy.deepcopy(eager)
    with torch.set_grad_enabled(train):
        add_tvm_dispatch(tvm, x.detach().clone(), options=options)
    return tvm, eager


def batch(step: int = 0) -> torch.Tensor:
    """The input of a step."""
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(32, 64, device="cuda", generator=generator)


def replays(module: nn.Module) -> int:
    """CUDA graphs replayed so far; nothing may have been left to eager PyTorch."""
    report = dispatch_report(module)
    assert not report.fallbacks, report.fallbacks
    return sum(s.graph_replays for s in report.specializations)


def skips(module: nn.Module) -> dict[str, int]:
    """Calls without a graph, by the reason."""
    found: dict[str, int] = {}
    for s in dispatch_report(module).specializations:
        for reason, count in s.graph_skips.items():
            found[reason] = found.get(reason, 0) + count
    return found


def gradients(module: nn.Module) -> Values:
    """Copies of the gradients of all parameters."""
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Equal but for the rounding of float32; gradients beside the largest of them."""
    assert found.keys() == expected.keys()
    for name, error in errors(found, expected).items():
        assert error < 1e-5, (name, error)


def errors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Norm of the difference over the norm, which counts as a hundredth of the largest at least."""
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    floor = max(1e-2 * max(norms.values()), 1e-30)
    return {
        name: float((found[name].double() - value.double()).norm()) / max(norms[name], floor)
        for name, value in expected.items()
    }


def step_values(
    module: nn.Module, args: tuple[torch.Tensor, ...], rounded: torch.dtype, *, train: bool
) -> tuple[Values, Values]:
    """The output with the buffers, and all gradients for a cotangent in dtype ``rounded``."""
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
    """Step by step: float64 equals eager, other dtypes are at most twice as far from float64."""
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
