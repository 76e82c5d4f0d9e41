"""ReturnWhole: gradients that are pieces of one tensor are returned as the whole tensor."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from tests.dispatch_helpers import eager
from tests.relax_helpers import apply_pass, assert_changes_nothing, build_main
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.passes.relax.return_whole import ReturnWhole, Whole, wholes_of

Formula: TypeAlias = Callable[[relax.Expr], list[relax.Expr]]


@I.ir_module
class Before:
    @R.function
    def backward(x: R.Tensor((1, 9), "float64"), y: R.Tensor((2,), "float64")):
        with R.dataflow():
            sine = R.sin(x)
            cosine = R.cos(y)
            pieces = R.split(sine, [2, 5], axis=1)
            a = pieces[0]
            b = pieces[1]
            c = pieces[2]
            gv = (b, cosine, a, c)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def backward(x: R.Tensor((1, 9), "float64"), y: R.Tensor((2,), "float64")):
        with R.dataflow():
            sine = R.sin(x)
            cosine = R.cos(y)
            results = (sine, cosine)
            R.output(results)
        return results


def test_the_whole_is_returned() -> None:
    after, report = apply_pass(ReturnWhole(), Before)
    assert report.rewrites == 1
    assert wholes_of(after["backward"]) == [Whole(0, (2, 0, 3), (2, 3, 4), 1)]
    bare = tvm.IRModule({"backward": after["backward"].without_attr("tvmbridge.wholes")})
    tvm.ir.assert_structural_equal(bare, Expected)


def test_callers_find_what_was_returned_before() -> None:
    after, _ = apply_pass(ReturnWhole(), Before)
    pieces = Pieces.of_function(after["backward"])
    whole, other = torch.randn(1, 9), torch.randn(2)
    b, found, a, c = pieces.of([whole, other])
    assert found is other
    for piece, columns in zip((a, b, c), (slice(0, 2), slice(2, 5), slice(5, 9)), strict=True):
        assert torch.equal(piece, whole[:, columns])
    b.zero_()
    assert (a._version, c._version, a._base) == (0, 0, None)
    assert pieces.places({0}) == {0, 2, 3}
    assert pieces.places({1}) == {1}


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        (lambda x: [*_fields(op.split(op.sin(x), 2, 1))], "its pieces are not contiguous"),
        (lambda x: [*_fields(op.split(x, 2, 0))], "its memory is that of an argument"),
        (lambda x: _with_whole(op.sin(x)), "its memory is that of an argument or of another"),
        (lambda x: _fields(op.split(op.sin(x), 2, 0))[:1], "a piece is used otherwise"),
        (lambda x: [*_fields(op.split(op.sin(x), 2, 0))] * 2, "a piece is used otherwise"),
    ],
)
def test_declined(formula: Formula, reason: str) -> None:
    mod = build_main([torch.randn(4, 6)], formula)
    report = assert_changes_nothing(ReturnWhole("main"), mod)
    assert reason in str(report.declined)


def _fields(pieces: relax.Expr) -> list[relax.Expr]:
    pieces = relax.BlockBuilder.current().emit(pieces)
    return [relax.TupleGetItem(pieces, i) for i in range(2)]


def _with_whole(value: relax.Expr) -> list[relax.Expr]:
    value = relax.BlockBuilder.current().emit(value)
    return [value, *_fields(op.split(value, 2, 0))]


class _Projections(nn.Module):
    """Three linear layers of the same input, whose products and gradients are combined."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        # No softmax: k's bias would have a gradient of rounding errors, which AdamW amplifies.
        return scores.sigmoid() @ self.v(x)


def test_gradients_of_combined_products_are_used_as_eager_s_are() -> None:
    """Use gradients in all ways: accumulate, scale by a hook, clip, save, and step an optimizer."""
    module, x = _Projections().double(), torch.randn(2, 5, 24, dtype=torch.float64)
    reference = eager(module)
    add_tvm_dispatch(module, x)
    found = []
    for m in (module, reference):
        m.q.weight.register_hook(lambda g: g.mul_(3))
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        for _ in range(3):
            for rows in (x, 2 * x):
                m(rows).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            m.k.weight.grad.zero_()
            m.q.zero_grad()
        found.append([*m.parameters(), *(p.grad for p in m.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert dispatch_report(module).fallbacks == {}
