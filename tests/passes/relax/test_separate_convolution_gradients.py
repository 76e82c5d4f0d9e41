"""SeparateConvolutionGradients: the gradient of the data in a call of its own, the same results."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
import tvm
from tvm import relax

from tests.relax_helpers import apply_pass, assert_changes_nothing, build_main, compile_and_run
from tvmbridge.kernels.aten_call import ATEN_CALL, aten_call_operator, packed_call, spec_of
from tvmbridge.passes.base import bindings_of
from tvmbridge.passes.relax.separate_convolution_gradients import SeparateConvolutionGradients

_SIZES = [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, 5, 6, 4), (2, 3, 6, 4), (5, 3, 3, 3)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def gradients(results: Sequence[int]) -> tvm.IRModule:
    """Return ``main`` with one call for the ``results``: of data (0), weight (1) and bias (2)."""
    dy, x, w = operands()
    types = [relax.TensorType(list(s), "float64") for s in (x.shape, w.shape, dy.shape[1:2])]
    mask = [number in results for number in range(3)]
    content = {
        "op": "aten.convolution_backward.default",
        "args": [*({"tensor": i} for i in range(3)), [5], *_SIZES, mask],
        "kwargs": {},
        "results": list(results),
    }

    def formula(*given: relax.Expr) -> list[relax.Expr]:
        type_ = relax.TupleType([types[i] for i in results])
        call = relax.BlockBuilder.current().emit(
            packed_call(ATEN_CALL, json.dumps(content), list(given), type_)
        )
        return [relax.TupleGetItem(call, i) for i in reversed(range(len(results)))]

    return build_main(operands(), formula)


def masks(mod: tvm.IRModule) -> list[list[bool]]:
    calls = [v for v in bindings_of(mod["main"]).values() if isinstance(v, relax.Call)]
    return [spec_of(c)["args"][-1] for c in calls if aten_call_operator(c) is not None]


@pytest.mark.parametrize("results", [(0, 1), (0, 2), (0, 1, 2)])
def test_the_data_has_a_call_of_its_own(results: tuple[int, ...]) -> None:
    mod = gradients(results)
    after, report = apply_pass(SeparateConvolutionGradients(), mod)
    assert report.rewrites == 1
    others = [number in results[1:] for number in range(3)]
    assert masks(after) == [[True, False, False], others]
    found = compile_and_run(after, *operands())
    mask = [number in results for number in range(3)]
    expected = torch.ops.aten.convolution_backward(*operands(), [5], *_SIZES, mask)
    wanted = [expected[number] for number in reversed(results)]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("results", [(0,), (1, 2)])
def test_other_calls_stay(results: tuple[int, ...]) -> None:
    assert_changes_nothing(SeparateConvolutionGradients(), gradients(results))
