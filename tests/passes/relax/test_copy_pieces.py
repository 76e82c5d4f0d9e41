"""CopyPieces: PyTorch does concatenations and splits of many pieces; others are unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.relax import op

from benchmarks.compile_scaling import Chains
from tests.dispatch_helpers import eager
from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
    operators,
)
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.copy_pieces import CopyPieces


def pieces(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return tensors of different lengths along the second dimension."""
    return [torch.randn(3, 1 + i % 4, 2).to(dtype) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("axis", [1, -2])
def test_many_are_joined_by_pytorch(axis: int, dtype: torch.dtype) -> None:
    tensors = pieces(20, dtype)
    mod = build_main(tensors, lambda *xs: op.concat(list(xs), axis))
    after, report = apply_pass(CopyPieces(), mod)
    assert (operators(after), report.rewrites) == (["relax.call_pure_packed"], 1)
    (result,) = compile_and_run(mod, *tensors)
    assert torch.equal(result, torch.cat(tensors, axis))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("axis", [1, -1])
def test_pytorch_splits_into_many(axis: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 20, 20).to(dtype)
    cuts = [1, 3, *range(4, 20)]

    def formula(x: relax.Expr) -> list[relax.Expr]:
        pieces = op.split(x, cuts, axis)
        return [relax.TupleGetItem(pieces, i) for i in (0, 1, 2, 17, 18)]

    mod = build_main([x], formula)
    after, _ = apply_pass(CopyPieces(), mod)
    assert "relax.split" not in operators(after)
    expected = torch.tensor_split(x, cuts, axis)
    for found, i in zip(compile_and_run(mod, x), (0, 1, 2, 17, 18), strict=True):
        assert torch.equal(found, expected[i])


def test_few_stay() -> None:
    mod = build_main(pieces(16), lambda *xs: op.concat(list(xs), 1))
    assert assert_changes_nothing(CopyPieces(), mod).declined == []
    mod = build_main(pieces(1), lambda x: relax.TupleGetItem(op.split(x, list(range(1, 3)), 0), 0))
    assert assert_changes_nothing(CopyPieces(), mod).declined == []


@pytest.mark.parametrize("training", but_slow([False, True], False))
def test_parallel_chains_are_one_function_called_often(training: bool) -> None:
    x = torch.randn(4, 8 * 24)
    module = nn.Sequential(Chains(24), nn.Linear(8 * 24, 3)).double().train(training)
    x = x.double().requires_grad_(training)
    reference = eager(module)
    add_tvm_dispatch(module, x)
    copy = x.detach().clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        result, expected = module(x), reference(copy)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    if training:
        result.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, copy.grad, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).fallbacks == {}
