"""The residual policies on small joint functions whose best coloring is known."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvmbridge
from tvmbridge.coloring import POLICIES, Coloring, JointGraph, color
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.differentiation.differentiate import JointModule


@I.ir_module
class Chain:
    """y = sigmoid(dropout(tanh(h))) v with h = x w; h has 32 bytes and determines the rest."""

    @R.function
    def joint(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((3, 4), "float32"),
        v: R.Tensor((4, 5), "float32"),
        mask: R.Tensor((2, 4), "bool"),
        ct_0: R.Tensor((2, 5), "float32"),
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            once = R.tanh(h)
            keep = R.astype(mask, "float32")
            dropped = R.multiply(once, keep)
            twice = R.sigmoid(dropped)
            y = R.matmul(twice, v)
            back = R.matmul(ct_0, R.permute_dims(v, [1, 0]))
            slope = R.multiply(back, twice)
            masked = R.multiply(slope, keep)
            inner = R.multiply(masked, once)
            grad_w = R.matmul(R.permute_dims(x, [1, 0]), inner)
            grad_v = R.matmul(R.permute_dims(twice, [1, 0]), ct_0)
            gv = (y, grad_w, grad_v)
            R.output(gv)
        return gv


@I.ir_module
class Narrow:
    """A float16 value cast to float64, its two slices, and a comparison of the slices."""

    @R.function
    def joint(x: R.Tensor((4, 6), "float16"), ct_0: R.Tensor((4, 3), "float64")):
        with R.dataflow():
            total = R.cumsum(x, axis=1)
            wide = R.astype(total, "float64")
            root = R.exp(wide)
            halves = R.split(root, 2, axis=1)
            left = halves[0]
            right = halves[1]
            large = R.greater(left, right)
            y = R.where(large, left, right)
            none = R.zeros(R.shape([4, 3]), dtype="float64")
            grad = R.where(large, ct_0, none)
            slope = R.multiply(grad, right)
            gv = (y, slope)
            R.output(gv)
        return gv


def joint_of(mod: tvm.IRModule, *, outputs: int = 1, drawn: tuple[str, ...] = ()) -> JointModule:
    """Return the joint function of ``mod``; parameters named ``ct_...`` are cotangents."""
    names = [p.name for p in mod["joint"].params]
    primals = tuple(n for n in names if not n.startswith("ct_"))
    return JointModule(
        mod=mod,
        primals=primals,
        cotangents=tuple(n for n in names if n.startswith("ct_")),
        cotangent_of=(0,),
        num_outputs=outputs,
        wanted=primals,
        drawn=drawn,
    )


def kept(coloring: Coloring) -> set[str]:
    return {v.name for v in (*coloring.residuals, *coloring.drawn)}


def test_min_cut_keeps_one_value_of_a_chain() -> None:
    joint = joint_of(Chain, drawn=("mask",))
    assert kept(color(joint, "save_all")) == {"once", "twice", "mask"}
    # The greedy rule keeps twice because its operand dropped is not kept.
    assert kept(color(joint, "recompute_cheap")) == {"once", "twice", "mask"}
    assert kept(color(joint, "min_cut")) == {"once", "mask"}


@I.ir_module
class Powers:
    @R.function
    def joint(x: R.Tensor((2, 3), "float32"), ct_0: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.cumsum(x, axis=1)
            b = R.tanh(a)
            c = R.multiply(b, a)
            y = R.cumsum(c, axis=1)
            first = R.multiply(ct_0, a)
            second = R.multiply(first, b)
            third = R.multiply(second, c)
            gv = (y, third)
            R.output(gv)
        return gv


def test_the_greedy_rule_repeats_what_follows_from_kept_values() -> None:
    joint = joint_of(Powers)
    assert kept(color(joint, "save_all")) == {"a", "b", "c"}
    assert kept(color(joint, "recompute_cheap")) == kept(color(joint, "min_cut")) == {"a"}


def test_of_equal_cuts_the_one_with_less_to_repeat_is_taken() -> None:
    coloring = color(joint_of(Chain, drawn=("mask",)), "min_cut")
    assert {v.name for v in coloring.repeated} == {"dropped", "twice", "keep"}


def test_what_a_product_of_backward_reads_is_kept() -> None:
    coloring = color(joint_of(Chain, drawn=("mask",)), "keep_operands")
    # grad_v reads twice through a permutation. To compute inner, once is also needed: it follows
    # from h, which the product has written, while once would be written to be kept.
    assert kept(coloring) == {"h", "twice", "mask"}
    assert kept(color(joint_of(Powers), "keep_operands")) == {"a"}


@I.ir_module
class Softmax:
    """The sum of a log-softmax of a product's rows, and its gradient."""

    @R.function
    def joint(
        x: R.Tensor((4, 3), "float32"),
        w: R.Tensor((3, 1024), "float32"),
        ct_0: R.Tensor((4, 1024), "float32"),
    ):
        with R.dataflow():
            logits = R.matmul(x, w)
            top = R.max(logits, axis=[1], keepdims=True)
            below = R.subtract(logits, top)
            logs = R.log(R.sum(R.exp(below), axis=[1], keepdims=True))
            y = R.sum(R.subtract(below, logs), axis=[1])
            share = R.multiply(ct_0, R.exp(R.subtract(below, logs)))
            dw = R.matmul(R.permute_dims(x, (1, 0)), share)
            gv = (y, dw)
            R.output(gv)
        return gv


@I.ir_module
class Biased:
    """An activation of a product and a bias in half precision, and its gradient."""

    @R.function
    def joint(
        x: R.Tensor((4, 3), "bfloat16"),
        w: R.Tensor((3, 8), "bfloat16"),
        b: R.Tensor((8,), "bfloat16"),
        ct_0: R.Tensor((4,), "bfloat16"),
    ):
        with R.dataflow():
            product = R.matmul(x, w)
            whole = R.add(product, b)
            y = R.sum(R.tanh(whole), axis=[1])
            slope = R.multiply(R.expand_dims(ct_0, [1]), R.tanh(whole))
            dw = R.matmul(R.permute_dims(x, (1, 0)), slope)
            gv = (y, dw)
            R.output(gv)
        return gv


def test_a_kernel_that_adds_the_bias_writes_the_sum() -> None:
    coloring = color(joint_of(Biased), "keep_operands")
    assert kept(coloring) == {"whole"}


def test_of_about_the_same_bytes_what_forward_writes_anyway_is_kept() -> None:
    joint = joint_of(Softmax)
    # Without the maxima, the differences take fewer bytes, but they would be written for that.
    assert kept(color(joint, "min_cut")) == {"below", "logs"}
    assert kept(color(joint, "keep_operands")) == {"logits", "top", "logs"}


@I.ir_module
class Cast:
    """A product in bfloat16; backward multiplies by the same weight."""

    @R.function
    def joint(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((4, 3), "float32"),
        ct_0: R.Tensor((2, 4), "bfloat16"),
    ):
        with R.dataflow():
            half = R.astype(R.permute_dims(w, (1, 0)), "bfloat16")
            given = R.astype(R.tanh(x), "bfloat16")
            y = R.matmul(given, half)
            dx = R.astype(R.matmul(ct_0, R.permute_dims(half, (1, 0))), "float32")
            dw = R.astype(R.matmul(R.permute_dims(given, (1, 0)), ct_0), "float32")
            gv = (y, dx, dw)
            R.output(gv)
        return gv


def test_a_weight_is_cast_once() -> None:
    coloring = color(joint_of(Cast), "keep_casts")
    assert kept(coloring) == {"half"}
    # The cast of a computed value is recomputed, which saves bytes.
    assert "given" in {v.name for v in coloring.repeated}
    assert kept(color(joint_of(Cast), "min_cut")) == set()
    assert kept(color(joint_of(Powers), "keep_casts")) == {"a"}


def test_masks_cost_a_byte_an_element() -> None:
    for drawn, expected in (((), 2 * 4 * 4), (("mask",), 2 * 4 * 4 + 2 * 4)):
        graph = JointGraph(joint_of(Chain, drawn=drawn))
        assert graph.bytes_kept(POLICIES["min_cut"](graph)) == expected


def test_a_comparison_decides_what_is_kept() -> None:
    """Check that ``right`` is kept: recomputed from ``total`` it may round differently.

    The comparison ``large`` could then give another result.
    """
    joint = joint_of(Narrow)
    graph = JointGraph(joint)
    assert {v.name for v in graph.fragile} == {"left", "right", "halves", "root"}
    assert kept(color(joint, "save_all")) == {"large", "right"}
    assert kept(color(joint, "min_cut")) == {"large", "right"}
    assert graph.bytes_kept(POLICIES["min_cut"](graph)) == 4 * 3 * 8 + 4 * 3


def test_dear_operators_run_twice_only_when_asked() -> None:
    joint = joint_of(Powers)
    assert kept(color(joint, "min_cut", ("relax.cumsum",))) == set()
    assert kept(color(joint, "save_all", ("relax.cumsum",))) == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["relax.softmux", "aten.nothing.default", "softmax", "a.b"])
def test_unknown_operators_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no operator '{name}'"):
        color(joint_of(Powers), "min_cut", (name,))


@I.ir_module
class Sign:
    @R.function
    def joint(x: R.Tensor((2, 3), "float32"), ct_0: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.cumsum(x, axis=1)
            h = R.nn.relu(a)
            y = R.cumsum(h, axis=1)
            positive = R.greater(h, R.const(0.0, "float32"))
            none = R.zeros(R.shape([2, 3]), dtype="float32")
            grad = R.where(positive, ct_0, none)
            gv = (y, grad)
            R.output(gv)
        return gv


def test_of_an_activation_its_sign_is_kept() -> None:
    coloring = color(joint_of(Sign), "min_cut")
    assert kept(coloring) == {"positive"}
    assert [b.var.name for b in coloring.forward] == ["a", "h", "y", "positive"]
    assert [b.var.name for b in coloring.backward] == ["none", "grad"]
    assert kept(color(joint_of(Sign), "save_all")) == {"h"}


def test_repeated_bindings_stand_before_their_first_use() -> None:
    backward = [b.var.name for b in color(joint_of(Chain), "min_cut").backward]
    assert backward.index("twice") > backward.index("back") - 1
    assert backward.index("twice") == backward.index("slope") - 1
    for name in ("dropped", "keep"):
        assert backward.index(name) < backward.index("twice")


@I.ir_module
class Pieces:
    @R.function
    def joint(x: R.Tensor((4, 4), "float32"), ct_0: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            total = R.cumsum(x, axis=1)
            both = R.split(total, 2, axis=1)
            y = both[0]
            joined = R.concat(both, axis=0)
            turned = R.reshape(joined, R.shape([4, 4]))
            grad = R.multiply(turned, ct_0)
            gv = (y, grad)
            R.output(gv)
        return gv


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tuple_that_is_read_whole_is_repeated(policy: str) -> None:
    assert kept(color(joint_of(Pieces), policy)) == {"total"}


@I.ir_module
class Opaque:
    @R.function
    def joint(x: R.Tensor((4, 4), "float32"), ct_0: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            both = R.call_pure_packed(
                "two",
                x,
                ty_args=[R.Tuple(R.Tensor((4, 4), "float32"), R.Tensor((4, 4), "float32"))],
            )
            y = both[0]
            joined = R.concat(both, axis=0)
            part = R.strided_slice(joined, axes=[0], begin=[0], end=[4])
            grad = R.multiply(part, ct_0)
            gv = (y, grad)
            R.output(gv)
        return gv


@pytest.mark.parametrize("policy", ["save_all", "recompute_cheap"])
def test_a_tuple_that_can_be_neither_kept_nor_repeated_is_refused(policy: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match="both as a whole"):
        color(joint_of(Opaque), policy)


def test_min_cut_lets_forward_take_it_apart() -> None:
    coloring = color(joint_of(Opaque), "min_cut")
    assert kept(coloring) == {"part"}
    assert {"joined", "part"} <= {b.var.name for b in coloring.forward}


@I.ir_module
class Empty:
    @R.function
    def joint(x: R.Tensor((0, 4), "float32"), ct_0: R.Tensor((0, 4), "float32")):
        with R.dataflow():
            y = R.cumsum(x, axis=1)
            z = R.exp(y)
            grad = R.multiply(z, ct_0)
            gv = (y, grad)
            R.output(gv)
        return gv


@pytest.mark.parametrize("policy", POLICIES)
def test_values_without_elements(policy: str) -> None:
    coloring = color(joint_of(Empty), policy)
    assert [b.var.name for b in coloring.forward] == ["y"]
    assert not coloring.drawn


class Gated(nn.Module):
    """A gated activation behind attention, whose backward is a kernel of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return nn.functional.silu(self.gate(x)) * self.up(x)


def test_behind_attention_activations_are_computed_again() -> None:
    module = Gated().bfloat16().train()
    x = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    tvmbridge.add_tvm_dispatch(module, x)
    (found,) = tvmbridge.dispatch_report(module).specializations
    assert any("attention" in name for name in found.aten_operators)
    assert "relax.sigmoid" not in {r.made_by for r in found.residuals}
