"""Ctrl-C during compilation, inside TVM, and while compiled code runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn

from tests.dispatch_helpers import eager
from tests.interrupts.storm import storm
from tests.interrupts.subjects import SUBJECTS
from tests.thinned import but_slow, thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler import cached_build, lowering
from tvmbridge.passes.base import PassReport, RelaxPass


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 18).reshape(3, 6)


@pytest.mark.parametrize(
    ("place", "stage"),
    thinned(
        [(lowering, "capture_staged"), (lowering, "derive"), (cached_build, "compile_code")], 3
    ),
)
def test_an_interrupted_compilation_leaves_no_trace(
    place: Any, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    module = _net().train()
    before = dict(module.__dict__)
    with monkeypatch.context() as patch:
        patch.setattr(place, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            add_tvm_dispatch(module, _x())
    assert module.__dict__ == before
    if stage == "compile_code":
        add_tvm_dispatch(module, _x())
        module.eval()
        with monkeypatch.context() as patch:
            patch.setattr(place, stage, interrupted)
            with pytest.raises(KeyboardInterrupt):
                module(_x())
        torch.testing.assert_close(module(_x()), eager(module)(_x()))
        assert dispatch_report(module).tvm_calls == 1
        assert not dispatch_report(module).fallbacks


class Interrupted(RelaxPass):
    """A pass that raises KeyboardInterrupt once, in a Python function that TVM calls."""

    pending = True

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def interrupt() -> None:
            raise KeyboardInterrupt

        if Interrupted.pending:
            Interrupted.pending = False
            tvm_ffi.convert(interrupt)()
        return mod


def test_an_interrupt_within_tvm_is_not_taken_for_a_failure() -> None:
    Interrupted.pending = False
    options = {"extra_passes": (Interrupted(),)}
    module = add_tvm_dispatch(_net().eval(), _x(), options=options)
    module.train()
    Interrupted.pending = True
    with pytest.raises(KeyboardInterrupt):
        module(_x())
    torch.testing.assert_close(module(_x()), eager(module)(_x()))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {})


@pytest.mark.parametrize("name", but_slow(["batch-norm", "inference"], "batch-norm"))
def test_calls_with_kernels_of_pytorch_survive_interrupts(name: str) -> None:
    with SUBJECTS[name]() as subject:
        assert storm(subject, seconds=1.5).interrupts > 2  # hundreds on a machine at rest


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_calls_survive_a_long_storm(name: str) -> None:
    with SUBJECTS[name]() as subject:
        assert storm(subject, seconds=60).interrupts > 100
