"""Bad input gets a clear error, and the module stays unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import make_block, sample
from tvmbridge import (
    BuildError,
    CaptureError,
    UnsupportedOperatorError,
    add_tvm_dispatch,
    dispatch_report,
)
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.runtime import entry_compiler


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.softmax(0).sum() > 0:  # the line that cannot be traced
            return x + 1
        return x - 1


class Stateful(nn.Module):
    """A forward that writes a buffer and draws random numbers, then refuses three columns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator, assignment]
        return self.linear(torch.rand_like(x) + x)


def _snapshot(module: Any) -> dict[str, Any]:
    return dict(module.__dict__) if isinstance(module, nn.Module) else {}


CASES: list[tuple[str, Any, Any, dict[str, Any], type[Exception], str]] = [
    ("not a module", len, sample(), {}, TypeError, "must be a torch.nn.Module"),
    ("refused", Stateful(), torch.zeros(2, 3), {}, CaptureError, "refuses this sample"),
    ("a dict", Stateful(), {"x": sample()}, {}, CaptureError, "sample_kwargs=sample"),
    ("too many", Stateful(), (torch.zeros(2, 4),) * 2, {}, CaptureError, "refuses this sample"),
    (
        "branching",
        Branching(),
        sample(),
        {"on_break": "forward"},
        CaptureError,
        r"test_errors.py:\d+.*x.softmax\(0\).sum\(\) > 0",
    ),
    ("index", nn.Embedding(5, 3), torch.tensor([5]), {}, CaptureError, "refuses this sample"),
    ("target", make_block(), sample(), {"target": "qpu"}, BuildError, "qpu"),
    ("kwargs", make_block(), sample(), {"sample_kwargs": 3}, TypeError, "sample_kwargs"),
    ("options", make_block(), sample(), {"options": {"joint": "x"}}, ValueError, "joint"),
    ("option name", make_block(), sample(), {"options": {"no": 1}}, TypeError, "unknown"),
    ("option type", make_block(), sample(), {"options": 7}, TypeError, "options"),
]


@pytest.mark.parametrize(
    ("module", "sample_input", "kwargs", "error", "text"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_bad_input(
    module: Any, sample_input: Any, kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = _snapshot(module)
    generator = torch.get_rng_state()
    with pytest.raises(error, match=text):
        add_tvm_dispatch(module, sample_input, **kwargs)
    assert _snapshot(module) == before
    assert torch.equal(generator, torch.get_rng_state())
    if isinstance(module, Stateful):
        assert module.calls == 0


def test_every_operator_without_a_gradient_rule_is_named() -> None:
    class Unusual(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cummax(x, 0).values + torch.digamma(x)

    module = Unusual().train()
    with pytest.raises(UnsupportedOperatorError) as caught:
        add_tvm_dispatch(module, sample().requires_grad_(), options={"joint": "relax"})
    assert "aten.cummax.default" in str(caught.value)
    assert "aten.digamma.default" in str(caught.value)
    assert "forward" not in module.__dict__


def test_an_unsupported_dtype_is_refused_by_name() -> None:
    class Complex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2).half()))

    with pytest.raises(UnsupportedOperatorError, match="complex32"):
        add_tvm_dispatch(Complex().eval(), sample())


def test_a_failure_at_the_second_mode_falls_back() -> None:
    class TrainsBadly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(24, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and self.weight.sum() > 100:
                return x
            return x * self.weight

    module = add_tvm_dispatch(TrainsBadly().eval(), sample()).train()
    output = module(sample())
    output.sum().backward()
    torch.testing.assert_close(module.weight.grad, sample().sum(0))  # type: ignore[union-attr]
    (reason,) = dispatch_report(module).fallbacks
    assert "branches by the value of a tensor" in reason


def test_code_that_cannot_run_is_found_before_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: LoadedModule, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("a kernel that fails")

    monkeypatch.setattr(LoadedModule, "call", broken)
    module = make_block().train()
    with pytest.raises(BuildError, match="a kernel that fails"):
        add_tvm_dispatch(module, sample())
    assert "forward" not in module.__dict__


def test_a_mistake_of_the_compiler_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any, **__: Any) -> Any:
        raise KeyError("val")

    monkeypatch.setattr(entry_compiler, "compile_module", mistaken)
    with pytest.raises(BuildError, match=r"fails on Linear \(KeyError: 'val'\)"):
        add_tvm_dispatch(nn.Linear(3, 3), torch.ones(2, 3))
    # The error of a bad sample comes first.
    with pytest.raises(CaptureError, match="refuses this sample input"):
        add_tvm_dispatch(nn.Linear(3, 3), torch.ones(2, 3, dtype=torch.float64))
