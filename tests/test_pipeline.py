"""The runner of passes: records of each pass, errors that name the pass, and dumps."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmbridge.core.errors import PassError
from tvmbridge.core.types import PassRecord
from tvmbridge.passes.base import PassReport, RelaxPass
from tvmbridge.passes.relax.append_cotangents import AppendCotangents
from tvmbridge.passes.relax.combine_parallel_batch_matmul import CombineParallelBatchMatmul
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.one_zapp import OneZapp
from tvmbridge.passes.relax.zapp_like import ZappLike
from tvmbridge.pipeline import (
    count_bindings,
    inference_passes,
    lowering_passes,
    pass_name,
    run_passes,
    tidy_passes,
    zapp_passes,
)


@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), s: R.Tensor(("n",), "float32")):
        with R.dataflow():
            ones = R.ones_like(x)
            y = R.multiply(ones, x)
            t = R.multiply(s, R.const(1.0, "float32"))
            gv = (y, t)
            R.output(gv)
        return gv


@I.ir_module
class Single:
    @R.function
    def main(x: R.Tensor((2,), "float32")):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y


@dataclass(frozen=True)
class Broken(RelaxPass):
    """A pass that raises an error."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        raise RuntimeError("the reason")


def unbound(mod: tvm.IRModule) -> tvm.IRModule:
    """A pass that returns a module with an unbound variable."""
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    return tvm.IRModule({"main": relax.Function([], relax.SeqExpr([], x), x.ty, True)})


def test_records_say_what_each_pass_did() -> None:
    records: list[PassRecord] = []
    after = run_passes(Module, [ZappLike(), OneZapp(), *tidy_passes()], records)
    zapp, one, *tidy = records
    assert (zapp.name, zapp.options, zapp.rewrites, zapp.declined) == ("ZappLike", "", 1, ())
    assert (one.name, one.rewrites) == ("OneZapp", 1)
    assert one.declined == ("relax.multiply: the shape is not static",)
    assert [r.name for r in tidy] == [
        "CanonicalizeBindings",
        "EliminateCommonSubexpr",
        "CanonicalizeBindings",
        "DeadCodeElimination",
    ]
    assert (zapp.bindings_before, zapp.bindings_after) == (4, 4)
    assert tidy[-1].bindings_after == count_bindings(after) == 2
    assert all(r.seconds > 0 for r in records)


def test_a_cleaning_pass_runs_once_on_a_module_that_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tvm.IRModule] = []
    records: list[PassRecord] = []
    apply = DeadCodeElimination.apply

    def noted(self: DeadCodeElimination, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        ran.append(mod)
        return apply(self, mod, report)

    monkeypatch.setattr(DeadCodeElimination, "apply", noted)
    clean, other = DeadCodeElimination(), DeadCodeElimination(("main",))
    passes = [clean, OneZapp(), clean, ZappLike(), clean, clean, other, clean, OneZapp()]
    after = run_passes(Module, passes, records)
    assert [r.name for r in records] == [pass_name(pass_) for pass_ in passes]
    assert [i for i, r in enumerate(records) if r.changed] == [3, 8]
    # Once before ZappLike and once after it; passes with other options are passes of their own.
    assert len(ran) == 3
    expected = Module
    for pass_ in passes:
        expected = pass_(expected)
    assert tvm_ffi.structural_equal(after, expected)


def test_records_tell_passes_that_changed_something() -> None:
    records: list[PassRecord] = []
    run_passes(Module, [ZappLike(), ZappLike()], records)
    assert [r.changed for r in records] == [True, False]


def test_options_of_a_pass_are_recorded() -> None:
    records: list[PassRecord] = []
    run_passes(Single, [AppendCotangents((0,), prefix="grad_")], records)
    assert records[0].options == "outputs=(0,), prefix='grad_'"


def test_a_method_among_options_is_told_by_its_name() -> None:
    class Holder:
        def refuse(self, name: str, kind: str = "") -> str | None:
            return None

        def __repr__(self) -> str:
            raise AssertionError("all that it holds is told")

    for refusal in (Holder().refuse, functools.partial(Holder().refuse, kind="input")):
        records: list[PassRecord] = []
        run_passes(Single, [CombineParallelBatchMatmul(weight_refusal=refusal)], records)
        assert "Holder.refuse, group_refusal=None" in records[0].options


def test_an_error_names_the_pass_and_keeps_its_cause() -> None:
    records: list[PassRecord] = []
    with pytest.raises(PassError, match="pass Broken failed: the reason") as caught:
        run_passes(Module, [ZappLike(), Broken(), OneZapp()], records)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [r.name for r in records] == ["ZappLike"]


def test_an_ill_formed_module_is_an_error_of_its_pass() -> None:
    with pytest.raises(PassError, match="pass unbound failed"):
        run_passes(Module, [unbound], [])


def test_an_error_of_a_pass_of_tvm_names_it() -> None:
    gradient = relax.transform.Gradient("absent")
    with pytest.raises(PassError, match="pass Gradient failed"):
        run_passes(Module, [gradient], [])


def test_names_of_passes() -> None:
    assert pass_name(OneZapp()) == "OneZapp"
    assert pass_name(relax.transform.DeadCodeElimination()) == "DeadCodeElimination"
    assert pass_name(unbound) == "unbound"


def test_the_module_after_each_pass_is_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made" / "here"
    monkeypatch.setenv("TVMBRIDGE_DUMP", str(folder))
    records: list[PassRecord] = []
    run_passes(Module, [ZappLike()], records)
    after = run_passes(Module, [OneZapp()], records)
    assert sorted(p.name for p in folder.iterdir()) == ["001_ZappLike.py", "002_OneZapp.py"]
    assert (folder / "002_OneZapp.py").read_text() == after.script(show_meta=False)


def test_nothing_is_dumped_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVMBRIDGE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    run_passes(Module, [ZappLike()], [])
    assert list(tmp_path.iterdir()) == []


def test_the_orders_of_passes() -> None:
    tidy = [pass_name(p) for p in tidy_passes()]
    whole = ["LowerBatchNorm", "LowerGroupNorm", "LowerInstanceNorm"]
    inference = ["LowerDropout", *whole, "RemoveNoGrad"]
    assert [pass_name(p) for p in inference_passes()] == [*inference, *tidy]
    # Equal dropouts draw different masks, so LowerDropout precedes the passes that merge equals.
    lowering = ["LowerDropout", "LowerLayerNorm", "LowerRMSNorm", *whole, "NestSplits"]
    assert [pass_name(p) for p in lowering_passes()] == [*lowering, *tidy]
    zapp = ["RemoveNoGrad", "CanonicalizeBindings", "ZappLike", "OneZapp", "ZeroZapp"]
    zapp += ["ZappLike", "CollapseViews"]
    assert [pass_name(p) for p in zapp_passes(("ct_0",))] == [*zapp, *tidy]
