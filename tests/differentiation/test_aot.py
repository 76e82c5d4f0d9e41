"""The joint function by PyTorch's derivatives (``aot``): its graph, random draws, side effects."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import relax

from tests.joint_cases import CASES, Head
from tests.joint_steps import assert_same, build, dispatched, step
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.coloring import color
from tvmbridge.core.errors import BridgeError, UnsupportedOperatorError
from tvmbridge.differentiation.aot import _traced, trace_joint
from tvmbridge.differentiation.facts import gradient_facts
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.frontend.registry import CONVERTERS
from tvmbridge.graph_capture.capture import capture
from tvmbridge.kernels.aten_call import aten_call_operator

aten = torch.ops.aten


def traced(name: str) -> Any:
    module, args = build(CASES[name])
    rehearsal = Rehearsal(module, args, {}, capture(module, args))
    return trace_joint(rehearsal, gradient_facts(rehearsal), [])


@pytest.mark.parametrize("name", thinned(["checkpoint", "noise", "transformer", "recurrent"], 4))
def test_no_random_operator_is_left(name: str) -> None:
    result = traced(name)
    called = result.imported.aten_calls
    assert not [c for c in called if "bernoulli" in c or "rand" in c or "dropout" in c]
    assert result.noise
    masks = [n for n in result.noise if n.drop_probability is not None]
    assert all(n.spec.dtype is torch.bool for n in masks)


def test_a_checkpoint_draws_once() -> None:
    assert len(traced("checkpoint").noise) == 2


def test_the_calling_convention() -> None:
    joint = traced("noise").joint
    names = [p.name for p in joint.mod["joint"].params]
    assert names == [*joint.primals, *joint.cotangents]


def test_aten_calls_run_once() -> None:
    joint = traced("convolutions").joint
    coloring = color(joint)
    forward = {b.var for b in coloring.forward if aten_operator(b)}
    backward = {b.var for b in coloring.backward if aten_operator(b)}
    assert forward
    assert backward
    assert not forward & backward
    assert all(isinstance(r.ty, relax.TensorType) for r in coloring.residuals)


def aten_operator(binding: relax.Binding) -> str | None:
    value = binding.value
    return aten_call_operator(value) if isinstance(value, relax.Call) else None


NATIVE = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda y: F.gelu(y, approximate="tanh"),
    "softmax": lambda y: F.softmax(y, 0),
    "log_softmax": lambda y: F.log_softmax(y, -1),
}


@pytest.mark.parametrize("name", thinned(NATIVE, 2))
def test_backward_operators_are_native(name: str) -> None:
    module = Head(lambda m, x: NATIVE[name](x * m.w)).double().train()
    edges = torch.tensor([0.0, -0.0, 40.0, -40.0, 1e-9, math.pi])
    x = (torch.cat([edges[None], torch.randn(3, 6)]).double(),)
    ours, compiled = dispatched(module, x, "aot")
    assert_same(step(ours, x), step(module, x))
    assert dict(compiled.aten_calls) == {}


def test_named_converters_exist() -> None:
    named = (
        aten._softmax_backward_data.default,
        aten.gelu_backward.default,
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.threshold_backward.default,
    )
    assert all(op in CONVERTERS for op in named)


class Stateful(nn.Module):
    """A module whose forward changes attributes, which compilation must not do."""

    def __init__(self) -> None:
        super().__init__()
        self.last_shape: tuple[int, ...] = ()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last_shape = tuple(x.shape)
        return self.drop(self.norm(x)).cumsum(0)


def test_tracing_leaves_the_module_as_it_was() -> None:
    module = Stateful().double().train()
    x = torch.randn(4, 6, dtype=torch.float64)
    captured = capture(module, x)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    tensors = {name: id(t) for name, t in module.state_dict(keep_vars=True).items()}
    attributes = module.__dict__.copy()
    torch.manual_seed(3)
    rehearsal = Rehearsal(module, (x,), {}, captured)
    trace_joint(rehearsal, gradient_facts(rehearsal), [])
    assert module.__dict__ == attributes
    assert {name: id(t) for name, t in module.state_dict(keep_vars=True).items()} == tensors
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), drawn)
    assert all(p.grad is None for p in module.parameters())


def test_half_precision_and_integers() -> None:
    module = Head(lambda m, x: (m.fc(x).cumsum(1), x.argmax(1))).to(torch.bfloat16).train()
    x = (torch.randn(3, 6, dtype=torch.bfloat16),)
    ours, _ = dispatched(module, x, "aot")
    mine, theirs = step(ours, x), step(module, x)
    torch.testing.assert_close(mine.outputs, theirs.outputs)
    torch.testing.assert_close(mine.gradients["fc.weight"], theirs.gradients["fc.weight"])


def test_strided_memory_is_refused_or_right() -> None:
    x = (torch.randn(3, 6, dtype=torch.float64),)
    module = Head(lambda m, x: (x * m.w).t().as_strided((2, 3), (1, 2))).double().train()
    ours, _ = dispatched(module, x, "aot")
    assert_same(step(ours, x), step(module, x))
    part = Head(lambda m, x: (x * m.w)[:, 1:].as_strided((2, 3), (1, 2))).double().train()
    with pytest.raises(BridgeError, match="strides"):
        dispatched(part, x, "aot")


def _losses(m: Head, x: torch.Tensor) -> Any:
    target = (x[:, :3].detach() > 0).to(torch.float32)
    logits, narrow = m.fc(x)[:, :3], x[:, 3:].float()
    bags = F.embedding_bag(
        torch.tensor([0, 1, 2, 0]),
        x.t(),
        torch.tensor([0, 2]),
        mode="sum",
        per_sample_weights=m.w[:4],
    )
    return (
        F.binary_cross_entropy_with_logits(logits, target),
        F.smooth_l1_loss(logits, narrow),
        F.smooth_l1_loss(narrow, logits),
        F.soft_margin_loss(narrow, target.double()),
        bags,
    )


def test_what_pytorch_foretells_wrongly() -> None:
    """Check operators whose fake kernels give a wrong dtype or shape."""
    module = Head(_losses).double().train()
    args = (torch.randn(3, 6, dtype=torch.float64),)
    ours, compiled = dispatched(module, args, "aot")
    assert_same(step(ours, args), step(module, args), rtol=1e-6, atol=1e-7)
    assert compiled.joint == "aot"


def test_equal_elements_of_an_expanded_input_are_sorted_as_in_eager() -> None:
    class Sorting(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.sort(x, 0)

    x = torch.randn(20, dtype=torch.float64).expand(20, 20).detach().requires_grad_()
    module = Sorting().train()
    add_tvm_dispatch(module, x, options={"joint": "aot"})
    assert all(map(torch.equal, module(x), Sorting()(x)))
    assert dispatch_report(module).tvm_calls == 1


def test_a_kernel_that_crashes_is_refused() -> None:
    module = Head(lambda m, x: F.pdist(x[:0] * m.w)).double().train()
    with pytest.raises(UnsupportedOperatorError, match="of no elements crashes"):
        dispatched(module, (torch.randn(3, 6).double(),), "aot")


def test_nearest_upsampling_of_an_empty_batch() -> None:
    class Upsampling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x, size=(5, 3), mode="nearest-exact")

    module = Upsampling().train()
    x = torch.empty(0, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(module, x)
    out = module(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (out.shape, gradient.shape) == ((0, 2, 5, 3), x.shape)
    assert dispatch_report(module).tvm_calls == 1


def test_an_error_without_a_text_is_told_by_its_type() -> None:
    def fails() -> None:
        raise AssertionError

    with pytest.raises(UnsupportedOperatorError, match="trace the gradient: AssertionError"):
        _traced(fails, [], {})
