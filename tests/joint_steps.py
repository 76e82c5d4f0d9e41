"""Run one training step of a case, compiled and in eager PyTorch, and compare."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.joint_cases import Case
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.dispatch import _code_of


@dataclass
class Step:
    """Outputs, gradients, buffers and the next random draw after one training step."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    next_draw: torch.Tensor


def build(case: Case) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the module of a case in train mode, and its arguments, both in float64."""
    torch.manual_seed(0)
    module = case.make().double().train()
    return module, tuple(a.double() if a.is_floating_point() else a for a in case.args())


def step(module: nn.Module, args: tuple[torch.Tensor, ...], use: slice = slice(None)) -> Step:
    """Run forward, and backward from the outputs ``use`` with cotangents of a fixed seed."""
    args = tuple(a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args)
    module.zero_grad()
    torch.manual_seed(7)
    outputs = pytree.tree_leaves(module(*args))
    generator = torch.Generator().manual_seed(1)
    flowing = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    cotangents = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in flowing]
    torch.autograd.backward(flowing[use], cotangents[use])
    gradients = {name: p.grad for name, p in module.named_parameters()}
    gradients |= {f"argument {i}": a.grad for i, a in enumerate(args)}
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    return Step(outputs, gradients, buffers, torch.rand(2))


def assert_same(ours: Step, eager: Step, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Assert that two steps agree up to rounding, and have None for the same gradients."""
    close = {"rtol": rtol, "atol": atol}
    for mine, theirs in zip(ours.outputs, eager.outputs, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs
            continue
        torch.testing.assert_close(mine, theirs, **close, equal_nan=True)
        assert mine.requires_grad is theirs.requires_grad
    assert ours.gradients.keys() == eager.gradients.keys()
    for name, theirs in eager.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (theirs is None), name
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, **close, equal_nan=True)
    for name, theirs in eager.buffers.items():
        torch.testing.assert_close(ours.buffers[name], theirs, **close)
    torch.testing.assert_close(ours.next_draw, eager.next_draw, rtol=0, atol=0)


def dispatched(
    module: nn.Module, args: tuple[torch.Tensor, ...], joint: str, policy: str | None = None
) -> tuple[nn.Module, CompiledModule]:
    """Return a dispatched copy of ``module``, and its compiled code.

    ``policy`` is the residual policy; None selects the default.
    """
    ours = copy.deepcopy(module)
    sample = tuple(
        a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args
    )
    chosen = {} if policy is None else {"residual_policy": policy}
    add_tvm_dispatch(ours, sample, options={"joint": joint, **chosen})
    ((_, entry),) = _code_of(ours).kept.known[0].compiled()
    return ours, entry.compiled


def assert_served(module: nn.Module, calls: int) -> None:
    """Assert that compiled code served all ``calls`` calls so far."""
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (calls, {})
