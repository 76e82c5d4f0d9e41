"""NestSplits: a split into many pieces becomes two steps, and its gradient equals eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.relax import op

from tests.dispatch_helpers import eager
from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
)
from tests.thinned import covering
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.nest_splits import NestSplits


@pytest.mark.parametrize(("axis", "count"), covering([0, -1], [17, 18, 25]))
def test_pieces_are_those_of_one_split(count: int, axis: int) -> None:
    x = torch.randn(30, 30)
    cuts = [1, 3, *range(4, count + 2)]

    def formula(x: relax.Expr) -> list[relax.Expr]:
        pieces = op.split(x, cuts, axis)
        return [relax.TupleGetItem(pieces, i) for i in range(len(cuts) + 1)]

    mod = build_main([x], formula)
    after, report = apply_pass(NestSplits(), mod)
    assert report.rewrites == 1
    expected = torch.tensor_split(x, cuts, axis)
    for found, piece in zip(compile_and_run(after, x), expected, strict=True):
        assert torch.equal(found, piece)


def test_few_pieces_stay() -> None:
    mod = build_main([torch.randn(16, 2)], lambda x: relax.TupleGetItem(op.split(x, 16, 0), 3))
    assert_changes_nothing(NestSplits(), mod)


class Uneven(nn.Module):
    """A module that splits into 20 pieces: some are read twice, some never, the others once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.chunk(20, dim=-1)
        chains = [torch.sin(p * (i + 1)) for i, p in enumerate(pieces) if i % 3]
        return torch.cat([*chains, pieces[1] * pieces[2]], dim=-1)


def test_gradients_are_those_of_eager() -> None:
    module = Uneven()
    x = torch.randn(3, 60, dtype=torch.float64, requires_grad=True)
    copy = x.detach().clone().requires_grad_()
    reference = eager(module)
    add_tvm_dispatch(module, x)
    found, expected = module(x), reference(copy)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).fallbacks == {}
