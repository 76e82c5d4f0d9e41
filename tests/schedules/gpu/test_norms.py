"""Layer norm with its statistics, and its backward, emulated: as PyTorch's own in float64."""

from __future__ import annotations

import json

import pytest
import torch
from tvm import relax

from tests.relax_helpers import build_main
from tests.schedules.gpu.emulator import run_module
from tvmbridge.kernels.aten_call import ATEN_CALL, packed_call
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls

Given = list[torch.Tensor | None]
_OPERATORS = {"forward": "native_layer_norm", "backward": "native_layer_norm_backward"}


def _call(name: str, given: Given, variables: tuple[relax.Var, ...], wide: str) -> list[relax.Expr]:
    """The results of the operator for ``given``, whose tensors are ``variables`` in a graph."""
    encoded, left = [], 0
    for value in given:
        encoded.append(None if value is None else {"tensor": left})
        left += value is not None
    x = next(v for v in given if v is not None)
    columns, dtype = [x.shape[-1]], str(x.dtype).removeprefix("torch.")
    rows = relax.TensorType([*x.shape[:-1], 1], wide)
    if name == "forward":
        args = [encoded[0], columns, *encoded[1:], 1e-5]
        types = [relax.TensorType(list(x.shape), dtype), rows, rows]
    else:
        args = [*encoded[:2], columns, *encoded[2:], [True, True, True]]
        types = [relax.TensorType(list(x.shape), dtype), *[relax.TensorType(columns, dtype)] * 2]
    content = {"op": f"aten.{_OPERATORS[name]}.default", "args": args, "kwargs": {}}
    spec = json.dumps({**content, "results": [0, 1, 2], "compiled": True})
    call = relax.BlockBuilder.current().emit(
        packed_call(ATEN_CALL, spec, list(variables), relax.TupleType(types))
    )
    return [relax.TupleGetItem(call, n) for n in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 48), (130, 37), (2, 768)])
def test_results_and_gradients(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    x, dy = torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype) if affine else None
    bias = torch.randn(shape[-1]).to(dtype) if affine else None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    doubled = [None if t is None else t.double() for t in (x, weight, bias)]
    exact = torch.native_layer_norm(doubled[0], [shape[-1]], *doubled[1:], 1e-5)  # type: ignore[arg-type]
    backward = torch.ops.aten.native_layer_norm_backward.default(
        dy.double(), doubled[0], [shape[-1]], *exact[1:], *doubled[1:], [True, affine, affine]
    )
    mean, rstd = (t.to(wide) for t in exact[1:])
    for name, given, wanted in (
        ("forward", [x, weight, bias], exact),
        ("backward", [dy, x, mean, rstd, weight, bias], backward),
    ):
        tensors = [t for t in given if t is not None]
        width = str(wide).removeprefix("torch.")
        mod = build_main(tensors, lambda *v, n=name, g=given, w=width: _call(n, g, v, w))
        found = run_module(CompileAtenCalls()(mod), *tensors)
        for ours, truth in zip(found, wanted, strict=True):
            if truth is None:
                continue
            bound = (
                1e-5 if ours.dtype is torch.float32 else 1e-13 if wide is torch.float64 else 6e-3
            )
            assert (ours.double() - truth).norm() <= bound * truth.norm(), name
