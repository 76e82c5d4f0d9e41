"""StopGradients and RemoveNoGrad: gradients flow only to inputs that need one."""

# ruff: noqa: ANN201, ANN202  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, assert_changes_nothing, compile_and_run
from tvmbridge.passes.relax.stop_gradients import (
    RemoveNoGrad,
    StopGradients,
    active_variables,
    is_floating,
)


@I.ir_module
class Before:
    @R.function
    def main(
        w: R.Tensor((2, 3), "float32"), m: R.Tensor((2, 3), "bool"), v: R.Tensor((3,), "float32")
    ):
        with R.dataflow():
            keep = R.astype(m, "float32")
            scaled = R.multiply(keep, v)
            y = R.multiply(w, scaled)
            z = R.add(y, scaled)
            apart = R.add(scaled, v)
            gv = (z, apart)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        w: R.Tensor((2, 3), "float32"), m: R.Tensor((2, 3), "bool"), v: R.Tensor((3,), "float32")
    ):
        with R.dataflow():
            keep = R.astype(m, "float32")
            scaled = R.multiply(keep, v)
            stopped = R.grad.no_grad(scaled)
            y = R.multiply(w, stopped)
            z = R.add(y, stopped)
            apart = R.add(scaled, v)
            stopped_1 = R.grad.no_grad(apart)
            gv = (z, stopped_1)
            R.output(gv)
        return gv


@I.ir_module
class Tuples:
    @R.function
    def main(w: R.Tensor((2, 3), "float64"), c: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            lv = R.exp(c)
            pieces = R.split(lv, 3, axis=1)
            piece = pieces[0]
            pair = (w, lv)
            joined = R.concat(pair, axis=0)
            inline = R.concat((w, piece), axis=1)
            back = pair[1]
            gv = (joined, inline, back)
            R.output(gv)
        return gv


@I.ir_module
class Detached:
    @R.function
    def main(w: R.Tensor((3,), "float64")):
        with R.dataflow():
            frozen = R.grad.no_grad(w)
            root = R.sqrt(frozen)
            y = R.multiply(w, root)
            R.output(y)
        return y


def wanted(mod: tvm.IRModule, *names: str) -> list[relax.Var]:
    return [p for p in mod["main"].params if p.name in names]


def names_of(found: set[relax.Var]) -> set[str]:
    return {v.name for v in found}


def test_wraps_what_depends_on_nothing_wanted() -> None:
    after, report = apply_pass(StopGradients(("w",)), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (2, [])


def test_nothing_is_wrapped_where_everything_is_wanted() -> None:
    after, report = apply_pass(StopGradients(("x",)), build_single())
    tvm.ir.assert_structural_equal(after, build_single())
    assert report.rewrites == 0


def build_single() -> tvm.IRModule:
    @I.ir_module
    class Single:
        @R.function
        def main(x: R.Tensor((3,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                R.output(y)
            return y

    return Single


@pytest.mark.parametrize("module", [Before, Tuples], ids=["tensors", "tuples"])
def test_agrees_with_the_module_in_float64(module: tvm.IRModule) -> None:
    after, report = apply_pass(StopGradients(("w",)), module)
    assert report.rewrites > 0
    inputs = {
        "w": torch.randn(2, 3),
        "m": torch.rand(2, 3) > 0.5,
        "v": torch.randn(3),
        "c": torch.randn(2, 3),
    }
    chosen = [inputs[p.name] for p in module["main"].params]
    if module is Tuples:
        chosen = [t.double() for t in chosen]
        w, c = chosen
        e = c.exp()
        expected = [torch.cat([w, e]), torch.cat([w, e[:, :1]], 1), e]
    else:
        w, m, v = chosen
        scaled = m * v
        expected = [w * scaled + scaled, scaled + v]
    for got, want in zip(compile_and_run(RemoveNoGrad()(after), *chosen), expected, strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-6 if got.dtype == torch.float32 else 1e-14, atol=0
        )


def test_applied_twice_changes_nothing() -> None:
    for module in (Before, Tuples, Detached):
        once = StopGradients(("w",))(module)
        assert_changes_nothing(StopGradients(("w",)), once)


def test_removed_again_the_module_is_as_it_was() -> None:
    after, report = apply_pass(RemoveNoGrad(), Expected)
    tidy = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(tidy(after), tidy(Before))
    assert report.rewrites == 2
    again, report = apply_pass(RemoveNoGrad(), after)
    tvm.ir.assert_structural_equal(again, after)
    assert report.rewrites == 0


def test_active_variables_stop_at_integers_and_no_grad() -> None:
    function = Detached["main"]
    assert names_of(active_variables(function, wanted(Detached, "w"))) == {"w", "y"}
    function = Tuples["main"]
    active = names_of(active_variables(function, wanted(Tuples, "w")))
    assert active == {"w", "pair", "joined", "inline", "back", "gv"}


def test_floating_types() -> None:
    def var(dtype: str) -> relax.Var:
        return relax.Var("v", relax.TensorType((2,), dtype))

    assert all(is_floating(var(d)) for d in ("float16", "bfloat16", "float32", "float64"))
    assert not any(is_floating(var(d)) for d in ("int8", "int64", "uint8", "bool"))
    mixed = relax.TupleType([var("int64").ty, var("float32").ty])
    assert is_floating(relax.Var("t", mixed))
    assert not is_floating(relax.Var("t", relax.TupleType([var("int64").ty])))
    assert not is_floating(relax.Var("s", relax.ShapeType([2, 3])))
