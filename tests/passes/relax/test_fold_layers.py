"""Equal parts of a long program become calls of one function, and bindings again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import relax

from tests.relax_helpers import build_main
from tvmbridge import CompileOptions, add_tvm_dispatch
from tvmbridge.backends import cpu
from tvmbridge.passes.base import PassReport, bindings_of
from tvmbridge.passes.relax.fold_layers import LAYER, FoldLayers, UnfoldLayers
from tvmbridge.pipeline import tidy_passes

_INPUTS = [torch.randn(4, 8) for _ in range(13)]
_FOLD = FoldLayers(least=10, group=3)


def _emit(value: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(value)


def _layer(x: relax.Expr, weight: relax.Expr, factor: float = 0.5) -> list[relax.Var]:
    inner = _emit(relax.op.tanh(_emit(relax.op.add(x, weight))))
    return [inner, _emit(relax.op.multiply(inner, relax.const(factor, "float32")))]


def _chain(factor: Callable[[int], float] = lambda _: 0.5) -> tvm.IRModule:
    """Return a chain of 12 layers, which returns a value from the middle of each."""

    def formula(x: relax.Expr, *weights: relax.Expr) -> list[relax.Expr]:
        results = []
        for number, weight in enumerate(weights):
            inner, x = _layer(x, weight, factor(number))
            results.append(inner)
        return [x, *results]

    return build_main(_INPUTS, formula)


def count_layers(mod: tvm.IRModule) -> int:
    """Return the number of calls of layers in the functions of ``mod``."""
    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    values = [value for f in functions for value in bindings_of(f).values()]
    calls = [v for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.GlobalVar)]
    return sum(LAYER in (mod[call.op].attrs or {}) for call in calls)


def _tidy(mod: tvm.IRModule) -> tvm.IRModule:
    for each in tidy_passes():
        mod = each(mod)
    return mod


def _assert_restored(mod: tvm.IRModule, calls: int) -> None:
    report = PassReport()
    folded = _FOLD.apply(mod, report)
    assert (count_layers(folded), report.rewrites) == (calls, calls)
    relax.analysis.well_formed(folded)
    restored = _tidy(UnfoldLayers()(folded))
    assert tvm_ffi.structural_equal(restored, _tidy(mod), map_free_vars=True)


def test_a_chain_is_folded_and_unfolded() -> None:
    mod = _chain()
    _assert_restored(mod, 12)
    folded = _FOLD(mod)
    assert len(folded.get_global_vars()) == 2
    assert _FOLD(_tidy(UnfoldLayers()(folded))).get_global_vars() == folded.get_global_vars()


def test_short_layers_are_taken_together() -> None:
    # 36 bindings with the tuple of the results are four layers of nine: too few.
    assert count_layers(FoldLayers(least=10, group=8)(_chain())) == 0


def test_a_short_function_stays() -> None:
    mod = _chain()
    assert FoldLayers()(mod).same_as(mod)
    assert UnfoldLayers()(mod).same_as(mod)


def test_a_layer_that_differs_stays_beside_the_others() -> None:
    _assert_restored(_chain(lambda number: 0.25 if number == 2 else 0.5), 9)


def test_layers_that_read_the_same_value_twice_or_skip_others() -> None:
    def formula(x: relax.Expr, *weights: relax.Expr) -> list[relax.Expr]:
        first, previous = x, x
        for number, weight in enumerate(weights):
            # The third layer adds its input to itself, and others the input of all layers.
            other = x if number == 2 else first
            y = _emit(relax.op.add(_layer(x, weight)[1], other))
            previous, x = x, _emit(relax.op.subtract(y, previous))
        return [x]

    mod = build_main(_INPUTS, formula)
    calls = count_layers(_FOLD(mod))
    assert 8 <= calls <= 10
    _assert_restored(mod, calls)


@pytest.mark.parametrize("training", [False, True])
def test_folded_programs_compute_the_same(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(FoldLayers):
        def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
            folded = super().apply(mod, report)
            made.append(count_layers(folded))
            return folded

    monkeypatch.setattr(cpu, "FoldLayers", lambda: Counted(least=20, group=3))

    def model() -> nn.Module:
        torch.manual_seed(0)
        pairs = ((nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(10))
        return nn.Sequential(*(each for pair in pairs for each in pair)).double().train(training)

    ours, reference = model(), model()
    x = torch.randn(4, 8, dtype=torch.float64)
    options = CompileOptions(only_if_faster=False, cache=False)
    add_tvm_dispatch(ours, x, options=options)
    assert min(made) >= 8
    with torch.set_grad_enabled(training):
        found, expected = ours(x), reference(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    if training:
        found.square().sum().backward()
        expected.square().sum().backward()
        for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)
