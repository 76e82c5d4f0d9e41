"""The joint function's two sources, ``relax`` and ``aot``, against eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.joint_cases import CASES, Head
from tests.joint_steps import assert_same, assert_served, build, dispatched, step
from tests.thinned import but_slow, thinned
from tvmbridge import UnsupportedOperatorError, add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.compiled import compile_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture.trace.decompositions import _table_with

RELAX = [name for name, case in CASES.items() if case.auto == "relax"]
# ``auto`` chooses one of the two sources. If it chooses relax, ``aot`` is tested by name as well:
# every second and eighth case in quick tests, all cases in slow ones.
ASKED = [
    *thinned((("auto", name) for name in CASES), 2),
    *thinned((("aot", name) for name in RELAX), 8),
]
REFUSED = {name: "joint='relax'" for name, case in CASES.items() if case.auto == "aot"} | {
    "detach": r"aten\.detach",
    "no_grad": r"stops the gradient at aten\.mul",
    "custom function": "custom autograd function Flipped",
    "custom identity": "custom autograd function Unchanged",
    "written in place": "no gradient rule for",
    "moving average": "stops the gradient",
}


@pytest.mark.parametrize(("joint", "name"), ASKED)
def test_two_steps_equal_eager(joint: str, name: str) -> None:
    module, args = build(CASES[name])
    ours, compiled = dispatched(module, args, joint)
    for _ in range(2):  # the second step reads buffers that the first wrote
        assert_same(step(ours, args), step(module, args))
    assert_served(ours, 2)
    assert compiled.joint == (CASES[name].auto if joint == "auto" else joint)
    assert (compiled.joint_reason == "asked for") is (joint == "aot")
    assert bool(compiled.joint_reason) is (compiled.joint == "aot")


@pytest.mark.parametrize("name", REFUSED)
def test_relax_refuses_what_it_would_get_wrong(name: str) -> None:
    module, args = build(CASES[name])
    with pytest.raises(UnsupportedOperatorError, match=REFUSED[name]) as raised:
        dispatched(module, args, "relax")
    assert "joint='relax'" in str(raised.value)
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("joint", ["aot", "relax"])
def test_no_gradient_where_no_used_output_depends(joint: str) -> None:
    module = Head(lambda m, x: (m.fc(x), (x * m.w).sum(), x > 0, x * 3)).double().train()
    args = (torch.randn(3, 6, dtype=torch.float64),)
    ours, _ = dispatched(module, args, joint)
    for use in (slice(0, 1), slice(1, 2), slice(2, 3)):
        assert_same(step(ours, args, use), step(module, args, use))


def test_zeros_where_eager_has_zeros() -> None:
    module = Head(lambda m, x: x + m.w.floor()).double().train()
    x = (torch.randn(3, 6, dtype=torch.float64),)
    ours, _ = dispatched(module, x, "auto")
    mine = step(ours, x)
    assert_same(mine, step(module, x))
    assert torch.equal(mine.gradients["w"], torch.zeros(6, dtype=torch.float64))  # type: ignore[arg-type]


@pytest.mark.slow  # tests/test_norms.py has an evaluation after two steps
def test_evaluation_with_gradients() -> None:
    module, args = build(CASES["convolutions"])
    ours, _ = dispatched(module, args, "auto")
    assert_same(step(ours, args), step(module, args))
    assert_same(step(ours.eval(), args), step(module.eval(), args))
    assert_served(ours, 2)


def _hooked(m: Head, x: torch.Tensor) -> torch.Tensor:
    y = x * m.w
    y.register_hook(lambda g: g * 2)
    return y


def _kept(m: Head, x: torch.Tensor) -> torch.Tensor:
    m.count = m.fc(x).sum()
    return x * m.w


class Leaky(nn.Module):
    """A module that reads a tensor which requires a gradient but is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.ones(6, dtype=torch.float64, requires_grad=True)
        self.register_buffer("scale", torch.ones(6, dtype=torch.float64))
        self.w = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.hidden * self.w


class WantingBuffer(Leaky):
    """A module with a buffer that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.w


@pytest.mark.parametrize("joint", ["relax", "aot", "auto"])
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Head(_hooked), "register_hook"),
        (Head(_kept), "requires a gradient into count"),
        (WantingBuffer(), "neither a parameter nor an input"),
    ],
    ids=["hook", "graph kept in a buffer", "buffer"],
)
def test_refused_by_every_source(module: nn.Module, reason: str, joint: str) -> None:
    module = copy.deepcopy(module).double().train()
    x = torch.randn(3, 6, dtype=torch.float64)
    with pytest.raises(UnsupportedOperatorError, match=reason):
        add_tvm_dispatch(module, x, options={"joint": joint})
    assert "forward" not in module.__dict__


def _flowing_nowhere(m: Head, x: torch.Tensor) -> Any:
    # 1 / (-0.0 + 0.0) is inf and 1 / -0.0 is -inf: no pass may remove the + 0.
    return m.fc(x).argmax(-1), x.detach() * 2, (x + m.w) > 0, x.view(-1), 1 / (x.detach() + 0.0)


@pytest.mark.parametrize("joint", but_slow(["relax", "aot", "auto"], "relax", "aot"))
def test_a_module_without_differentiable_outputs_runs_forward(joint: str) -> None:
    module = Head(_flowing_nowhere).double().train()
    x = torch.randn(3, 6, dtype=torch.float64)
    x[0, :2] = torch.tensor([-0.0, 0.0])
    ours, compiled = dispatched(module, (x,), joint)
    assert_same(step(ours, (x,)), step(module, (x,)))
    assert_served(ours, 1)
    assert compiled.joint is None
    # Other requires_grad flags need another specialization.
    for each in (ours, module):
        each.requires_grad_(False)
    assert_same(step(ours, (x,)), step(module, (x,)))
    assert_served(ours, 2)
    assert len(dispatch_report(ours).specializations) == 2


class Writer(nn.Module):
    """A module that writes into arguments: statistics, and a counter that it reads and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.5, 6))

    def forward(
        self, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
    ) -> Any:
        y = torch.nn.functional.batch_norm(x, mean, variance, self.w, training=True)
        y = y * count.clone()
        count.add_(1)
        return y, torch.where(x > 0, 1 / (x.abs() + 0.0), x) * self.w, count


@pytest.mark.parametrize("joint", thinned(["aot", "auto"], 2))
def test_arguments_are_written_in_training(joint: str) -> None:
    module = Writer().double().train()

    def arguments() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
        return [x, torch.zeros(6).double(), torch.ones(6).double(), torch.full((6,), 2.0).double()]

    ours = copy.deepcopy(module)
    add_tvm_dispatch(ours, tuple(arguments()), options={"joint": joint})
    found = []
    for each in (ours, module):
        x, *written = arguments()
        version = written[2]._version
        for _ in range(2):
            y, z, count = each(x, *written)
        assert count is written[2]
        gradients = torch.autograd.grad(y.cos().sum() + z.sum(), [x, each.w])
        assert written[2]._version == version + 2
        found.append((written, gradients))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)
    assert_served(ours, 2)
    x, *written = arguments()
    with pytest.raises(RuntimeError):  # as in eager: a leaf that requires a gradient is written
        ours(x, *(t.requires_grad_() for t in written))


def test_a_value_read_before_it_is_overwritten_is_refused_as_in_eager() -> None:
    def forward(m: Head, x: torch.Tensor) -> torch.Tensor:
        y = m.w * m.count
        m.count.add_(1)
        return x * y

    module = Head(forward).double().train()
    with pytest.raises(UnsupportedOperatorError, match="modified by an inplace operation"):
        add_tvm_dispatch(module, torch.randn(3, 6, dtype=torch.float64))


def test_draws_that_export_loses_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = build(CASES["recurrent"])
    # Decompositions that lose dropout; the eager replay does not use decompositions.
    lost = {
        torch.ops.aten.dropout.default: lambda x, p, train: x.clone(),
        torch.ops.aten.native_dropout.default: lambda x, p, train: (x.clone(), x > 0),
    }
    monkeypatch.setattr(
        "tvmbridge.graph_capture.trace.decompositions.recurrent_decompositions", lambda table: lost
    )
    monkeypatch.setattr(
        "tvmbridge.graph_capture.trace.decompositions._table_with", _table_with.__wrapped__
    )
    with pytest.raises(UnsupportedOperatorError, match="other random numbers"):
        dispatched(module, args, "relax")
    with torch.no_grad(), pytest.raises(UnsupportedOperatorError, match="other random numbers"):
        compile_module(CompileRequest(module, args, {}, needs_grad=False, options=CompileOptions()))
    ours, compiled = dispatched(module, args, "auto")
    assert compiled.joint == "aot"
    assert_same(step(ours, args), step(module, args))


def test_the_report_says_why() -> None:
    module, args = build(CASES["detach"])
    ours, _ = dispatched(module, args, "auto")
    assert dispatch_report(ours).specializations[0].joint == "aot"
    assert "forward stops the gradient at aten.detach" in str(dispatch_report(ours))
