"""The guide docs/writing_a_pass.md: its code runs, and its pass fulfils all rules of passes."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

from tests.relax_helpers import apply_pass, build_main, compile_and_run, fingerprint
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import PassError
from tvmbridge.core.options import CompileOptions
from tvmbridge.dispatch import _code_of
from tvmbridge.passes.base import PassReport, RelaxPass

GUIDE = Path(__file__).parents[1] / "docs" / "writing_a_pass.md"
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Run the code blocks of the guide, with their assertions, as one module; yield the module."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    path = tmp_path_factory.mktemp("guide") / "writing_a_pass.py"
    path.write_text("from __future__ import annotations\n" + "\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("writing_a_pass", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["writing_a_pass"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["writing_a_pass"]


def scaled(*factors: float) -> Callable[[relax.Expr], relax.Expr]:
    def formula(x: relax.Expr) -> relax.Expr:
        for factor in factors:
            x = relax.op.multiply(x, relax.const(factor, "float32"))
        return x

    return formula


def cleaned(mod: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.DeadCodeElimination()(mod)


def test_the_guide_is_short() -> None:
    assert len(GUIDE.read_text(encoding="utf-8").splitlines()) < 150


def test_scales_merge(guide: ModuleType) -> None:
    mod = build_main((X,), scaled(2.0, -4.0, 0.3))
    before = fingerprint(mod)
    after, report = apply_pass(guide.MergeScales(), mod)
    assert fingerprint(mod) == before
    tvm.ir.assert_structural_equal(cleaned(after), build_main((X,), scaled(-8.0 * 0.3)))
    assert (report.rewrites, report.declined) == (2, [])


def test_declines_with_the_reason(guide: ModuleType) -> None:
    before = build_main((X,), scaled(0.0, 2.0))
    after, report = apply_pass(guide.MergeScales(), before)
    tvm.ir.assert_structural_equal(after, before)
    assert report.declined == ["relax.multiply: 0 is no power of two"]


def test_agrees_with_pytorch_in_float64(guide: ModuleType) -> None:
    (result,) = compile_and_run(guide.MergeScales()(build_main((X,), scaled(2.0, 0.3))), X)
    torch.testing.assert_close(result.double(), X.double() * 0.6, rtol=1e-6, atol=0)


def test_applied_twice_changes_nothing(guide: ModuleType) -> None:
    once = guide.MergeScales()(build_main((X,), scaled(2.0, 0.3)))
    twice, report = apply_pass(guide.MergeScales(), cleaned(once))
    tvm.ir.assert_structural_equal(twice, cleaned(once))
    assert report.rewrites == 0


@pytest.mark.parametrize("training", [False, True])
def test_runs_in_the_pipeline(guide: ModuleType, training: bool) -> None:
    module = guide.Scaled(2.0).train(training)
    x = X.clone().requires_grad_(training)
    options = CompileOptions(extra_passes=(guide.MergeScales(),))
    with torch.set_grad_enabled(training):
        add_tvm_dispatch(module, x, options=options)
    ((_, entry),) = _code_of(module).kept.known[0].compiled()
    records = [r for r in entry.compiled.records if r.name == "MergeScales"]
    assert [(r.rewrites >= 1, r.options) for r in records] == [(True, "rounding=False")]
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(module(x), torch.exp(x * 0.25))
    if training:
        (gradient,) = torch.autograd.grad(module(x).sum(), x)
        torch.testing.assert_close(gradient, torch.exp(x.detach() * 0.25) * 0.25)
    assert dispatch_report(module).fallbacks == {}


@pytest.mark.parametrize("given", [RelaxPass, [RelaxPass()], (RelaxPass,), ("fold",)])
def test_what_is_no_pass_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="extra_passes"):
        CompileOptions(extra_passes=given)


@dataclasses.dataclass(frozen=True)
class Emptied(RelaxPass):
    """A pass that changes what the function returns."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return build_main((X,), lambda x: [x, x])


def test_the_calling_convention_must_stay() -> None:
    module = nn.ReLU().eval()
    options = CompileOptions(extra_passes=(Emptied(),))
    with torch.no_grad(), pytest.raises(PassError, match="Emptied changed the parameters"):
        add_tvm_dispatch(module, X, options=options)
    assert "forward" not in module.__dict__
