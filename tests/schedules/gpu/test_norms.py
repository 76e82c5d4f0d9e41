"""Emulated norms with their statistics and backward: results equal PyTorch's in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pytest
import torch
from tvm import relax

from tests.relax_helpers import build_main
from tests.schedules.gpu.emulator import run_module
from tests.thinned import but_slow
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


# An operator, its arguments, and its results in float64; None is a result that is not checked.
Call = tuple[str, list[Any], Sequence[torch.Tensor | None]]


def _types(call: Call, wide: torch.dtype) -> list[relax.Type]:
    operator, args, exact = call
    x = next(a for a in args if isinstance(a, torch.Tensor))
    found = []
    for number, truth in enumerate(exact):
        shape = [x.shape[-1]] if truth is None else list(truth.shape)
        dtype = wide if number and "backward" not in operator else x.dtype
        found.append(relax.TensorType(shape, str(dtype).removeprefix("torch.")))
    return found


def _layer_norm(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> Iterator[Call]:
    columns, wide = [shape[-1]], _wide(dtype)
    x, dy = torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(columns).to(dtype) if affine else None for _ in range(2))
    exact_x, *parameters = (None if t is None else t.double() for t in (x, weight, bias))
    assert exact_x is not None
    exact = torch.native_layer_norm(exact_x, columns, *parameters, 1e-5)
    yield "native_layer_norm", [x, columns, weight, bias, 1e-5], exact
    mask = [True, affine, affine]
    gradients = torch.ops.aten.native_layer_norm_backward.default(
        dy.double(), exact_x, columns, *exact[1:], *parameters, mask
    )
    statistics = [t.to(wide) for t in exact[1:]]
    args = [dy, x, columns, *statistics, weight, bias, mask]
    yield "native_layer_norm_backward", args, gradients


def _rms_norm(eps: float | None, affine: bool, dtype: torch.dtype) -> Iterator[Call]:
    columns, wide = [300], _wide(dtype)
    x, dy = torch.randn(7, 300).to(dtype) * 1e-2, torch.randn(7, 300).to(dtype)
    weight = torch.randn(300).to(dtype) if affine else None
    exact_x = x.double().requires_grad_()
    exact_weight = None if weight is None else weight.double().requires_grad_()
    added = torch.finfo(wide).eps if eps is None else eps
    y = torch.nn.functional.rms_norm(exact_x, columns, exact_weight, added)
    rstd = (exact_x.square().mean(-1, keepdim=True) + added).rsqrt()
    yield "_fused_rms_norm", [x, columns, weight, eps], [y.detach(), rstd.detach()]
    wanted = [exact_x] if exact_weight is None else [exact_x, exact_weight]
    gradients = [*torch.autograd.grad(y, wanted, dy.double()), None]
    args = [dy, x, columns, rstd.detach().to(wide), weight, [True, affine]]
    yield "_fused_rms_norm_backward", args, gradients[:2]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize(
    "dtype", but_slow([torch.float32, torch.bfloat16, torch.float64], torch.float32, torch.float64)
)
def test_norms_and_their_gradients(dtype: torch.dtype) -> None:
    """Compile all cases as one module, whose kernels are compiled for the host once."""
    calls: list[Call] = []
    for shape, affine in (((3, 5, 48), True), ((130, 37), False), ((2, 768), True)):
        calls += _layer_norm(shape, affine, dtype)
    calls += [*_rms_norm(None, True, dtype), *_rms_norm(1e-3, False, dtype)]
    tensors = [[a for a in args if isinstance(a, torch.Tensor)] for _, args, _ in calls]
    given = [*chain.from_iterable(tensors)]

    def graph(*variables: relax.Var) -> list[relax.Expr]:
        rest, results = iter(variables), list[relax.Expr]()
        for call, own in zip(calls, tensors, strict=True):
            types = _types(call, _wide(dtype))
            results += _call(call[0], call[1], types, tuple(islice(rest, len(own))))
        return results

    found = run_module(CompileAtenCalls()(build_main(given, graph)), *given)
    expected = [(operator, truth) for operator, _, exact in calls for truth in exact]
    for ours, (operator, truth) in zip(found, expected, strict=True):
        if truth is not None:
            error = (ours.double() - truth).norm() / truth.norm()
            assert error <= _BOUNDS[ours.dtype], (operator, tuple(truth.shape))
