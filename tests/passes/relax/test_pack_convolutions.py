"""PackConvolutions: convolutions of channels-last images read packed weights."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    CompiledFunctions,
    apply_pass,
    assert_changes_nothing,
    operators,
)
from tvmbridge.kernels import packed_convolution
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.kernels.convolution_loops import Maker
from tvmbridge.kernels.packed_convolution import PackedForm, faster_packed
from tvmbridge.passes.relax.pack_convolutions import (
    PackConvolutions,
    otherwise_laid_out,
    packable_convolutions,
)
from tvmbridge.pipeline import tidy_passes
from tvmbridge.schedules.alone import convolution

FORM = PackedForm((2, 4, 5, 6), (6, 2, 3, 3), (1, 2), (1, 0), (1, 1), 2)
PACK = PackConvolutions((("w", FORM),))

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


@I.ir_module
class Plain:
    @R.function
    def forward(
        x: R.Tensor((2, 4, 5, 6), "float32"),
        w: R.Tensor((6, 2, 3, 3), "float32"),
        b: R.Tensor((6,), "float32"),
    ):
        with R.dataflow():
            bare = R.nn.conv2d(x, w, strides=[1, 2], padding=[1, 0, 1, 0], groups=2)
            row = R.reshape(b, R.shape([1, 6, 1, 1]))
            y = R.add(bare, row)
            z = R.nn.relu(y)
            gv = (z,)
            R.output(gv)
        return gv


@I.ir_module
class Transposed:
    @R.function
    def forward(
        x: R.Tensor((2, 4, 5, 6), "float32"),
        w: R.Tensor((4, 3, 3, 2), "float32"),
        b: R.Tensor((6,), "float32"),
    ):
        with R.dataflow():
            bare = R.nn.conv2d_transpose(
                x, w, strides=[2, 1], padding=[1, 0, 1, 0], output_padding=[1, 0], groups=2
            )
            row = R.reshape(b, R.shape([1, 6, 1, 1]))
            gv = (R.add(bare, row),)
            R.output(gv)
        return gv


@I.ir_module
class Pooled:
    @R.function
    def forward(x: R.Tensor((2, 4, 4, 6), "float32")):
        with R.dataflow():
            y = R.nn.max_pool2d(x, (2, 2), layout="NHWC")
            gv = (y,)
            R.output(gv)
        return gv


def _before(mod: tvm.IRModule = Plain) -> tvm.IRModule:
    """Return ``mod`` in channels-last layout."""
    layouts = {"relax.nn.conv2d": ["NHWC", "OIHW"], "relax.nn.conv2d_transpose": ["NHWC", "IOHW"]}
    return _tidy(relax.transform.ConvertLayout(layouts)(mod))


def _tidy(mod: tvm.IRModule) -> tvm.IRModule:
    for pass_ in tidy_passes():
        mod = pass_(mod)
    return mod


def test_structure() -> None:
    after, report = apply_pass(PACK, _before())
    assert (report.rewrites, report.declined) == (1, [])
    found = operators(_tidy(after))
    assert found.count("relax.call_pure_packed") == 1
    assert "relax.nn.conv2d" not in found
    assert "relax.add" not in found
    assert [p.name for p in after["forward"].params] == ["x", "w", "b", "packed_weight_0"]


def test_values() -> None:
    x, w, b = torch.randn(2, 4, 5, 6), torch.randn(6, 2, 3, 3), torch.randn(6)
    packed = FORM.pack(w)
    (found,) = CompiledFunctions(_tidy(PACK(_before())))("forward", x, w, b, packed.ticket)
    exact = torch.nn.functional.conv2d(
        x.double(), w.double(), b.double(), (1, 2), (1, 0), groups=2
    ).relu()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alone", [False, True])
def test_values_of_a_transposed_one(alone: bool) -> None:
    ((_, form),) = packable_convolutions(Transposed["forward"], ("w",))
    form = dataclasses.replace(form, alone=alone)
    x, w, b = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 2), torch.randn(6)
    after = _tidy(PackConvolutions((("w", form),))(_before(Transposed)))
    assert "relax.nn.conv2d_transpose" not in operators(after)
    packed = form.pack(w)
    (found,) = CompiledFunctions(after)("forward", x, w, b, packed.ticket)
    exact = torch.nn.functional.conv_transpose2d(
        x.double(), w.double(), b.double(), (2, 1), (1, 0), (1, 0), groups=2
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_others_are_declined() -> None:
    other = dataclasses.replace(FORM, stride=(1, 1))
    _, report = apply_pass(PackConvolutions((("w", other),)), _before())
    assert report.declined == ["relax.nn.conv2d: not among the packings"]
    assert report.rewrites == 0


def test_twice_is_once() -> None:
    assert_changes_nothing(PackConvolutions(()), _tidy(PACK(_before())))


def test_what_is_packable() -> None:
    assert packable_convolutions(Plain["forward"], ("w", "b")) == [("w", FORM)]
    assert packable_convolutions(Plain["forward"], ("b",)) == "a weight is computed at each call"


def test_layouts_of_other_operators() -> None:
    assert otherwise_laid_out(Pooled["forward"])
    assert not otherwise_laid_out(_before()["forward"])


@pytest.mark.parametrize("faster", [False, True])
def test_loops_are_what_packed_ones_are_compared_with(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = PackedForm((2, 16, 12, 9), (24, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    asked = []

    def is_faster(same: SameConvolution, make: Maker) -> bool:
        asked.append(same)
        return faster

    monkeypatch.setattr(packed_convolution, "faster_in_loops", is_faster)
    x, weight = torch.randn(form.data), torch.randn(form.weight)
    found = packed_convolution.not_packed(form, convolution, x, weight)
    assert asked == [SameConvolution(ConvolutionResult.RESULT, 2, 16, 24, 12, 9, biased=True)]
    assert isinstance(found, functools.partial) == faster
    result = found()
    result = found.args[-1] if isinstance(found, functools.partial) else result
    expected = torch.conv2d(x.double(), weight.double(), padding=1)
    # The tolerance fits sums of 144 products of numbers around 1.
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-4)
    strided = dataclasses.replace(form, stride=(2, 2))
    packed_convolution.not_packed(strided, convolution, x, weight)
    assert len(asked) == 1


def test_nothing_is_chosen_unmeasured() -> None:
    assert not faster_packed([FORM], measure=False, make=convolution)
    assert not faster_packed([], measure=True, make=convolution)
