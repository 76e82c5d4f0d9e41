"""Elementary functions against float64, over their whole range and at special values."""

from __future__ import annotations

import math

import pytest
import torch
from tvm.relax import op

from tests.legalize.compiled import build_module, compile_module, run, run_all, ulps

TINY = torch.finfo(torch.float32).tiny
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 3.4e38, -3.4e38]
SPECIAL += [1e-40, -1e-40, 1e-6, -1e-6, 88.7, 88.8, -87.4, -103.9, -104.1]

# By name: (Relax operator, PyTorch function, largest allowed error in units of the last place).
FUNCTIONS = {
    "exp": (op.exp, torch.exp, 1.0),
    "log": (op.log, torch.log, 1.0),
    "erf": (op.erf, torch.erf, 2.0),
    "tanh": (op.tanh, torch.tanh, 2.0),
    # PyTorch's float32 result is as inaccurate: 1 + e^-x and the quotient both round.
    "sigmoid": (op.sigmoid, torch.sigmoid, 2.5),
    "silu": (op.nn.silu, torch.nn.functional.silu, 2.5),
    "rsqrt": (op.rsqrt, torch.rsqrt, 1.5),
    "sqrt": (op.sqrt, torch.sqrt, 0.5),
}


def everywhere() -> torch.Tensor:
    """Return float32 numbers of all magnitudes, denser near the curved parts of the functions."""
    parts = [torch.logspace(-44, 38, 20000), torch.linspace(0, 1.5, 30001)]
    parts += [torch.linspace(0, 20, 20001), torch.linspace(0, 110, 20001)]
    size = torch.cat(parts).float()
    return torch.cat([size, -size, torch.tensor(SPECIAL)])


def test_float32_is_within_its_bound_everywhere() -> None:
    x = everywhere()
    results = run_all(*((function, x) for function, _, _ in FUNCTIONS.values()))
    for (name, (_, reference, bound)), result in zip(FUNCTIONS.items(), results, strict=True):
        exact, eager = reference(x.double()), reference(x)
        torch.testing.assert_close(result.isnan(), eager.isnan())
        infinite = eager.isinf()
        torch.testing.assert_close(result[infinite], eager[infinite])
        # If PyTorch's float32 result underflows, for example because 1 + e^-x overflows, ours may
        # have the same error.
        normal = torch.isfinite(eager) & (eager.abs() >= TINY)
        assert ulps(result, exact)[normal].max() <= bound, name
        small = torch.isfinite(eager) & (eager.abs() < TINY)
        allowed = (eager.double() - exact).abs().clamp_min(1.5e-45)
        assert ((result.double() - exact).abs() <= allowed)[small].all(), name


def test_float32_special_values_are_torch_s() -> None:
    names = ("exp", "log", "erf", "tanh")
    x = torch.tensor([0.0, math.inf, -math.inf, math.nan] * 9)
    results = run_all(*((FUNCTIONS[name][0], x) for name in names))
    for name, result in zip(names, results, strict=True):
        expected = FUNCTIONS[name][1](x)
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)


def test_signed_zero_is_kept() -> None:
    x = torch.full((16,), -0.0)
    for function in (op.tanh, op.erf):
        assert torch.signbit(run(function, x)).all()


def test_erf_is_within_2e_7() -> None:
    x = torch.linspace(-6, 6, 100001)
    assert (run(op.erf, x).double() - torch.erf(x.double())).abs().max() <= 2e-7


def test_gelu_is_within_one_and_a_half_eps_of_its_argument() -> None:
    x = torch.cat([torch.linspace(-12, 12, 200001), torch.tensor([1e-30, -1e-30, 1e30])])
    results = run_all((op.nn.gelu, x), (op.nn.gelu_tanh, x))
    for approximate, result in zip(("none", "tanh"), results, strict=True):
        exact = torch.nn.functional.gelu(x.double(), approximate=approximate)
        error = (result.double() - exact).abs()
        assert (error <= 1.5 * torch.finfo(torch.float32).eps * x.double().abs()).all()


def test_gelu_of_nan_infinite_and_large() -> None:
    result = run(op.nn.gelu, torch.tensor([math.nan, 100.0, -100.0, math.inf, -math.inf] * 4))[:5]
    assert result[1:3].tolist() == [100.0, 0.0]
    assert result[[0, 3, 4]].isnan().all()


def _of_all(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return name, argument and result of each function, compiled as one module."""
    names = (*FUNCTIONS, "gelu", "gelu_tanh")
    x = torch.linspace(-9, 9, 1003, dtype=torch.float64).to(dtype)
    given = [x.abs() + 0.01 if name in ("log", "rsqrt", "sqrt") else x for name in names]
    results = run_all(*((_pair(name)[0], y) for name, y in zip(names, given, strict=True)))
    return list(zip(names, given, results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_float32(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for name, x, result in _of_all(dtype):
        exact = _pair(name)[1](x.double())
        # Half a unit of rounding plus the error in float32, which for gelu is relative to its
        # argument.
        allowed = eps / 2 * exact.abs() + 2e-7 * (exact.abs() + x.double().abs())
        allowed = allowed + torch.finfo(dtype).smallest_normal * eps / 2
        assert ((result.double() - exact).abs() <= allowed).all(), name
        assert result.dtype == dtype


def test_float64_is_exact() -> None:
    for name, x, result in _of_all(torch.float64):
        exact = _pair(name)[1](x)
        # gelu's error is relative to its argument: in PyTorch too, 1 + erf cancels for negative x.
        assert ((result - exact).abs() <= 2e-15 * exact.abs() + 1e-16 * x.abs()).all(), name


def _pair(name: str) -> tuple:
    if name in FUNCTIONS:
        return FUNCTIONS[name][:2]
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return (
        getattr(op.nn, name),
        lambda x: torch.nn.functional.gelu(x, approximate=approximate),
    )


def test_functions_stand_without_a_schedule() -> None:
    x = torch.linspace(-3, 3, 100)
    plain = compile_module(build_module(op.nn.gelu, (x,)), scheduled=False)
    torch.testing.assert_close(plain(x), torch.nn.functional.gelu(x), rtol=1e-6, atol=1e-6)
