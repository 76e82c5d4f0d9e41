"""Whole modules: writes to state, structures of results, and operators that TVM lacks."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.dispatch_helpers import assert_same_step, eager, sample, train_step
from tests.thinned import covering
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import UnsupportedOperatorError

Pair = namedtuple("Pair", "first second")


def test_batch_norm_writes_its_statistics_as_eager_does() -> None:
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    module = add_tvm_dispatch(network.double().train(), sample(8, 6).requires_grad_())
    reference = eager(module)
    for seed in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert_same_step(module, reference, x)
    with torch.no_grad():
        torch.testing.assert_close(module(sample(8, 6)), reference(sample(8, 6)))
    for (name, ours), theirs in zip(module.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)
    assert dispatch_report(module).tvm_calls == 4
    module.eval()
    reference.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(sample(8, 6)), reference(sample(8, 6)))
    assert not dispatch_report(module).fallbacks


def test_a_written_input_is_written() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            x[0] = 1
            return x.sum(0)

    module = add_tvm_dispatch(Writes().eval(), sample())
    ours, theirs = sample(), sample()
    torch.testing.assert_close(module(ours), Writes()(theirs))
    torch.testing.assert_close(ours, theirs)
    assert dispatch_report(module).tvm_calls == 1


class Replaces(nn.Module):
    """Backward reads a value of a buffer that forward replaced or wrote into afterwards.

    With ``offset`` 0 eager PyTorch saves the buffer itself, otherwise a sum with the offset.
    """

    scale: torch.Tensor

    def __init__(self, in_place: bool, offset: float = 0.0) -> None:
        super().__init__()
        self.in_place, self.offset = in_place, offset
        self.register_buffer("scale", torch.full((24,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * (self.scale + self.offset if self.offset else self.scale)
        if self.in_place:
            self.scale.add_(1)
        else:
            self.scale = self.scale * 0.5 + 1
        return y * y


@pytest.mark.parametrize(("joint", "offset"), covering(["relax", "aot"], [0.0, 0.5]))
def test_a_replaced_buffer_that_backward_reads(joint: str, offset: float) -> None:
    in_place = offset > 0
    ours, theirs = Replaces(in_place, offset).train(), Replaces(in_place, offset).train()
    add_tvm_dispatch(ours, sample().requires_grad_(), options={"joint": joint})
    for module in (ours, theirs):
        # The first call's backward runs after the second forward.
        x = sample().requires_grad_()
        first, _ = module(x), module(x)
        first.sum().backward()
        module.found = x.grad
    torch.testing.assert_close(ours.found, theirs.found, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-12, atol=1e-12)
    assert dispatch_report(ours).tvm_calls == 2


class Decays(Replaces):
    """Forward writes a buffer before it reads it; eager PyTorch saves the buffer for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        return x * self.scale


def test_backward_computes_a_written_buffer_again_from_its_former_value() -> None:
    ours, theirs = Decays(True).train(), Decays(True).train()
    add_tvm_dispatch(
        ours, sample().requires_grad_(), options={"residual_policy": "recompute_cheap"}
    )
    for _ in range(2):
        assert_same_step(ours, theirs, sample())
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-12, atol=1e-12)
    assert dispatch_report(ours).tvm_calls == 2


@pytest.mark.parametrize("joint", ["relax", "aot", "auto"])
def test_a_buffer_that_is_written_before_backward_reads_it_is_refused(joint: str) -> None:
    module = Replaces(True).train()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        Replaces(True).train()(sample().requires_grad_()).sum().backward()
    with pytest.raises(UnsupportedOperatorError, match="modified by an inplace"):
        add_tvm_dispatch(module, sample().requires_grad_(), options={"joint": joint})


class Structured(nn.Module):
    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        x, (y, z) = batch["x"], batch["rest"]
        total = (x + y) * scale
        return {
            "pair": Pair(total, [z, None]),
            "name": "structured",
            "tuple": (total.sum(), 3),
            "input": x,
        }


def test_structures_go_in_and_come_out() -> None:
    def batch() -> dict[str, Any]:
        return {"x": sample(2, 3), "rest": (sample(2, 3) + 1, torch.tensor(5))}

    module = add_tvm_dispatch(Structured().eval(), (batch(),), sample_kwargs={"scale": 0.5})
    given = batch()
    ours, theirs = module(given, scale=0.5), Structured()(given, scale=0.5)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    assert isinstance(ours["pair"], Pair)
    assert ours["input"] is given["x"]
    assert ours["name"] == "structured"
    torch.testing.assert_close(ours["pair"].first, theirs["pair"].first)
    torch.testing.assert_close(ours["tuple"][0], theirs["tuple"][0])
    assert dispatch_report(module).tvm_calls == 1
    module(given, scale=0.25)
    module(batch())
    # The second call leaves ``scale`` at its default, 1.0.
    assert dispatch_report(module).fallbacks == {"an argument that is not a tensor differs": 2}
    torch.testing.assert_close(module(scale=0.5, batch=given)["pair"].first, ours["pair"].first)
    assert dispatch_report(module).tvm_calls == 2


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(24, 12)
        self.after = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.cummax(self.before(x), 0)
        return self.after(values * (indices > 1))


def test_an_unusual_operator_is_an_aten_call_in_one_function() -> None:
    module = add_tvm_dispatch(Unusual().double().eval(), sample())
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), eager(module)(sample()))
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert report.aten_calls == ["aten.cummax.default"]
    assert "aten.cummax.default" in str(report)


def test_an_unusual_operator_trains() -> None:
    module = add_tvm_dispatch(Unusual().double().train(), sample().requires_grad_())
    assert_same_step(module, eager(module), sample())
    assert dispatch_report(module).tvm_calls == 1


def test_a_parameter_that_is_not_used_gets_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.ones(24, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(24, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.ones(24, dtype=torch.float64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.used * self.frozen

    module = add_tvm_dispatch(Partly().train(), sample().requires_grad_())
    assert "unused" not in train_step(module, sample())
    assert_same_step(module, eager(module), sample())
    assert module.frozen.grad is None
    assert dispatch_report(module).tvm_calls == 2
