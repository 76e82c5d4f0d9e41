"""Emulated pooling of images with channels last: results equal PyTorch's in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import functional
from tvm import relax

from tests.relax_helpers import build_main
from tests.schedules.gpu.emulator import run_module
from tests.thinned import thinned
from tvmbridge.kernels.aten_call import ATEN_CALL, packed_call
from tvmbridge.legalize.aten import FOR_GPUS
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls

AVG, MAX = "aten.avg_pool2d.default", "aten.max_pool2d_with_indices.default"
# Kernel size, stride, padding, and the further arguments of each operator.
POOLS: list[tuple[str, tuple[Any, ...]]] = [
    (AVG, ([3, 3], [1, 1], [1, 1], False, True)),
    (AVG, ([3, 2], [2, 3], [1, 1], True, False)),
    (AVG, ([3, 3], [2, 2], [1, 0], True, True)),
    (AVG, ([2, 2], [], [0, 0], False, True, 7)),
    (MAX, ([3, 3], [2, 2], [1, 1], [1, 1], True)),
    (MAX, ([2, 5], [], [1, 2])),
]


def _exact(operator: str, x: torch.Tensor, given: tuple[Any, ...]) -> torch.Tensor:
    if operator == AVG:
        return functional.avg_pool2d(x, *given)
    values: torch.Tensor = torch.ops.aten.max_pool2d_with_indices.default(x, *given)[0]
    return values


@pytest.mark.parametrize(
    ("dtype", "channels"), thinned([(torch.bfloat16, 16), (torch.float32, 3)], 2)
)
def test_pools(dtype: torch.dtype, channels: int) -> None:
    x = torch.randn(2, channels, 9, 10).to(dtype)
    x[0, 0, 0, 0], x[0, 1, 4, 4], x[1, 0, 8, 9], x[1, 2] = torch.inf, torch.nan, -torch.inf, -0.0
    exact = [_exact(operator, x.double(), given) for operator, given in POOLS]

    def graph(v: relax.Expr) -> list[relax.Expr]:
        emit, found = relax.BlockBuilder.current().emit, []
        for (operator, given), wanted in zip(POOLS, exact, strict=True):
            shape = [wanted.shape[axis] for axis in (0, 2, 3, 1)]
            type_: relax.Type = relax.TensorType(shape, str(dtype).removeprefix("torch."))
            type_ = type_ if operator == AVG else relax.TupleType([type_])
            spec = {
                "op": operator,
                "args": [{"channels_last": 0}, *given],
                "kwargs": {},
                "results": None if operator == AVG else [0],
                "compiled": True,
                "channels_last": True,
            }
            call = packed_call(ATEN_CALL, json.dumps(spec), [v], type_)
            made = emit(call)
            found.append(made if operator == AVG else emit(relax.TupleGetItem(made, 0)))
        return found

    last = x.permute(0, 2, 3, 1).contiguous()
    mod = CompileAtenCalls(FOR_GPUS)(build_main([last], graph))
    results = run_module(mod, last)
    for ours, wanted in zip(results, exact, strict=True):
        bound = torch.finfo(dtype).eps
        found = ours.permute(0, 3, 1, 2).double()
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound, equal_nan=True)
        zero = wanted == 0
        assert torch.equal(found[zero].signbit(), wanted[zero].signbit())
