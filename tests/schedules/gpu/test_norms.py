"""Emulated norms with their statistics and backward: results equal PyTorch's in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tvm import relax

from tests.relax_helpers import build_main
from tests.schedules.gpu.emulator import run_module
from tvmbridge.kernels.aten_call import ATEN_CALL, packed_call
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls

# Tolerances for float32 statistics of values around 3; bfloat16 rounds the result as well.
_BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 6e-3}


def _call(
    operator: str, args: list[Any], results: list[relax.Type], variables: tuple[relax.Var, ...]
) -> list[relax.Expr]:
    """Return the results of the operator; ``variables`` replace the tensors among ``args``."""
    numbers = iter(range(len(variables)))
    encoded = [{"tensor": next(numbers)} if isinstance(a, torch.Tensor) else a for a in args]
    content = {"op": f"aten.{operator}.default", "args": encoded, "kwargs": {}, "compiled": True}
    spec = json.dumps({**content, "results": list(range(len(results)))})
    call = packed_call(ATEN_CALL, spec, list(variables), relax.TupleType(results))
    made = relax.BlockBuilder.current().emit(call)
    return [relax.TupleGetItem(made, n) for n in range(len(results))]


def _check(operator: str, args: list[Any], exact: Sequence[torch.Tensor | None]) -> None:
    """Run the operator by emulated kernels, and compare with ``exact``, its results in float64.

    None among ``exact`` is a result that is not checked.
    """
    given = [a for a in args if isinstance(a, torch.Tensor)]
    x, wide = given[0], torch.float64 if given[0].dtype is torch.float64 else torch.float32

    def type_of(truth: torch.Tensor | None, is_statistic: bool) -> relax.Type:
        shape = [x.shape[-1]] if truth is None else list(truth.shape)
        dtype = wide if is_statistic else x.dtype
        return relax.TensorType(shape, str(dtype).removeprefix("torch."))

    forward = "backward" not in operator
    results = [type_of(truth, forward and n > 0) for n, truth in enumerate(exact)]
    mod = build_main(given, lambda *v: _call(operator, args, results, v))
    for ours, truth in zip(run_module(CompileAtenCalls()(mod), *given), exact, strict=True):
        if truth is not None:
            error = (ours.double() - truth).norm() / truth.norm()
            assert error <= _BOUNDS[wide if ours.dtype is wide else ours.dtype], operator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "affine"), [((3, 5, 48), True), ((130, 37), False), ((2, 768), True)]
)
def test_layer_norm(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    columns, wide = [shape[-1]], torch.float64 if dtype is torch.float64 else torch.float32
    x, dy = torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(columns).to(dtype) if affine else None for _ in range(2))
    exact_x, *parameters = (None if t is None else t.double() for t in (x, weight, bias))
    assert exact_x is not None
    exact = torch.native_layer_norm(exact_x, columns, *parameters, 1e-5)
    _check("native_layer_norm", [x, columns, weight, bias, 1e-5], exact)
    mask = [True, affine, affine]
    gradients = torch.ops.aten.native_layer_norm_backward.default(
        dy.double(), exact_x, columns, *exact[1:], *parameters, mask
    )
    statistics = [t.to(wide) for t in exact[1:]]
    args = [dy, x, columns, *statistics, weight, bias, mask]
    _check("native_layer_norm_backward", args, gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("eps", "affine"), [(None, True), (1e-3, False)])
def test_rms_norm(eps: float | None, affine: bool, dtype: torch.dtype) -> None:
    columns, wide = [300], torch.float64 if dtype is torch.float64 else torch.float32
    x, dy = torch.randn(7, 300).to(dtype) * 1e-2, torch.randn(7, 300).to(dtype)
    weight = torch.randn(300).to(dtype) if affine else None
    exact_x = x.double().requires_grad_()
    exact_weight = None if weight is None else weight.double().requires_grad_()
    added = torch.finfo(wide).eps if eps is None else eps
    y = torch.nn.functional.rms_norm(exact_x, columns, exact_weight, added)
    rstd = (exact_x.square().mean(-1, keepdim=True) + added).rsqrt()
    _check("_fused_rms_norm", [x, columns, weight, eps], [y.detach(), rstd.detach()])
    wanted = [exact_x] if exact_weight is None else [exact_x, exact_weight]
    gradients = [*torch.autograd.grad(y, wanted, dy.double()), None]
    args = [dy, x, columns, rstd.detach().to(wide), weight, [True, affine]]
    _check("_fused_rms_norm_backward", args, gradients[:2])
