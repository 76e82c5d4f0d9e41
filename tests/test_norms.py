"""Modules with norms agree with eager PyTorch in gradients, running statistics and precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.joint_cases import Case
from tests.joint_steps import assert_same, assert_served, build, dispatched, step
from tests.thinned import but_slow
from tvmbridge import CaptureError, add_tvm_dispatch
from tvmbridge.dispatch import _code_of

Make = Callable[[], nn.Module]


class HandwrittenRMSNorm(nn.Module):
    """RMS norm written out in elementary operators, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


NORMS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(6), (3, 5, 6)),
    "layer over two dimensions, no bias": (lambda: nn.LayerNorm((5, 6), bias=False), (3, 5, 6)),
    "rms": (lambda: nn.RMSNorm(6), (3, 5, 6)),
    "rms by hand": (lambda: HandwrittenRMSNorm(6), (3, 5, 6)),
    "group": (lambda: nn.GroupNorm(2, 6), (3, 6, 5)),
    "group of rows": (lambda: nn.GroupNorm(3, 6), (3, 6)),
    "instance2d": (lambda: nn.InstanceNorm2d(6, affine=True), (3, 6, 5, 4)),
    "instance3d, tracking": (
        lambda: nn.InstanceNorm3d(6, affine=True, track_running_stats=True),
        (2, 6, 2, 3, 2),
    ),
    "batch1d": (lambda: nn.BatchNorm1d(6, momentum=0.3), (3, 6, 5)),
    "batch2d": (lambda: nn.BatchNorm2d(6, eps=1e-2), (3, 6, 5, 4)),
    "batch2d, one sample": (lambda: nn.BatchNorm2d(6), (1, 6, 5, 4)),
    "batch2d, cumulative": (lambda: nn.BatchNorm2d(6, momentum=None), (3, 6, 5, 4)),
    "batch2d, untracked": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False),
        (3, 6, 5, 4),
    ),
    "in a module": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(5, 5)),
        (3, 6, 5),
    ),
}
BY_AUTOGRAD = ("layer", "rms", "group", "instance3d, tracking", "batch2d, cumulative")


class Norms(nn.Module):
    """Norms with random weights, each of an argument of its own: one compilation tests them all."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.each = nn.ModuleList(NORMS[name][0]() for name in names)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        return [norm(x) for norm, x in zip(self.each, given, strict=True)]


def case(*names: str) -> Case:
    def arguments() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(NORMS[name][1]) * 2 + 3 for name in names)

    return Case(lambda: Norms(names), arguments, "relax")


# Norms that are slow tests: a norm that stays a quick test has the same rule. "layer" is also in
# the quick test of norms that PyTorch derives.
ALIKE = ("layer", "rms", "group of rows", "instance2d", "batch1d", "batch2d")


@pytest.mark.parametrize(
    ("joint", "names"),
    [
        ("relax", tuple(name for name in NORMS if name not in ALIKE)),
        ("aot", BY_AUTOGRAD[::3]),
        pytest.param("relax", ALIKE, marks=pytest.mark.slow),
    ],
)
def test_two_steps_and_an_evaluation_equal_eager(joint: str, names: tuple[str, ...]) -> None:
    module, args = build(case(*names))
    ours, compiled = dispatched(module, args, joint)
    assert compiled.joint == joint
    for _ in range(2):
        assert_same(step(ours, args), step(module, args), rtol=1e-12, atol=1e-12)
    assert_same(step(ours.eval(), args), step(module.eval(), args), rtol=1e-12, atol=1e-12)
    assert_served(ours, 3)


@pytest.mark.slow  # tests/runtime/test_modules.py has a call without gradients
def test_statistics_move_without_gradients_too() -> None:
    module, args = build(case("batch2d", "batch2d, cumulative", "instance3d, tracking"))
    ours = copy.deepcopy(module.requires_grad_(False))
    with torch.no_grad():
        add_tvm_dispatch(ours, args)
        for training in (True, True, False):
            ours.train(training), module.train(training)
            torch.testing.assert_close(ours(*args), module(*args), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(ours.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert_served(ours, 3)


def test_evaluation_runs_natively() -> None:
    module, args = build(case("batch2d", "group", "instance2d", "rms", "layer"))
    ours = copy.deepcopy(module).eval()
    with torch.no_grad():
        add_tvm_dispatch(ours, args)
        torch.testing.assert_close(ours(*args), module.eval()(*args), rtol=1e-12, atol=1e-12)
    ((_, entry),) = _code_of(ours).kept.known[0].compiled()
    assert entry.compiled.aten_calls == {}


def test_one_value_per_channel_is_refused_as_by_eager() -> None:
    module = nn.BatchNorm1d(6).train()
    with pytest.raises(CaptureError, match="more than 1 value per channel"):
        add_tvm_dispatch(module, torch.randn(1, 6))
    assert "forward" not in module.__dict__


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (value.double() - exact).abs().max().item()


@pytest.mark.parametrize(
    ("dtype", "offset", "bound"),
    # Rounding a mean of 1e4 to float32 costs 5e-4; 2^-8 is half a step of bfloat16 from 2 to 4.
    [(torch.float32, 1e4, 2e-3), (torch.bfloat16, 100.0, 2**-7)],
)
def test_large_offsets_and_half_precision(dtype: torch.dtype, offset: float, bound: float) -> None:
    names = ("layer", "group", "instance2d", "batch2d")
    module = Norms(names)
    for norm in module.each:
        norm.reset_parameters()
    module = module.to(dtype).train().requires_grad_(False)
    given = []
    for name in names:
        torch.manual_seed(0)
        given.append((torch.randn(NORMS[name][1]) + offset).to(dtype))
    exact = copy.deepcopy(module).double()(*[x.double() for x in given])
    with torch.no_grad():
        add_tvm_dispatch(module, tuple(given))
        for name, found, wanted in zip(names, module(*given), exact, strict=True):
            assert _error(found, wanted) < bound, name
    assert_served(module, 1)


def test_the_default_epsilon_of_rms_norm_in_half_precision() -> None:
    module, x = nn.RMSNorm(64).bfloat16().eval(), (torch.randn(4, 64) * 1e-4).bfloat16()
    expected = copy.deepcopy(module)(x)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("copied", but_slow([False, True], True), ids=["buffers", "clones"])
def test_statistics_that_a_later_norm_updates_are_those_that_forward_read(copied: bool) -> None:
    class Both(nn.Module):
        """A batch norm in eval mode, and then in train mode, on the same buffers."""

        def __init__(self, copied: bool) -> None:
            super().__init__()
            self.norm, self.copied = nn.BatchNorm1d(3), copied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read = [self.norm.running_mean, self.norm.running_var]
            if self.copied:
                read = [each.clone() for each in read]
            own = self.norm.weight, self.norm.bias
            y = nn.functional.batch_norm(x, *read, *own, training=False)
            return y.pow(3) + self.norm(2 * x)

    module, reference = Both(copied).double(), Both(True).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(module, x)
    found, expected = (
        torch.autograd.grad(each(x).pow(2).sum(), [x, each.norm.weight])
        for each in (module, reference)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))
