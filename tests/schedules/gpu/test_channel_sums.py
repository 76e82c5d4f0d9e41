"""Emulated batch norms of images with channels last: within rounding of PyTorch's in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional
from tvm import relax

from tests.relax_helpers import apply_pass, assert_changes_nothing, build_main
from tests.schedules.gpu.emulator import run_module
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch
from tvmbridge.backends import BACKENDS
from tvmbridge.kernels.aten_call import ATEN_CALL, packed_call
from tvmbridge.kernels.dtypes import to_relax_dtype
from tvmbridge.passes.relax.batch_norms_last import BatchNormsLast

aten = torch.ops.aten
EPS, MOMENTUM = 1e-3, 0.1
NORM = "aten._native_batch_norm_legit_functional.default"
PLAIN = "aten._native_batch_norm_legit.no_stats"
BACKWARD = "aten.native_batch_norm_backward.default"


def _module(
    operator: str,
    inputs: Sequence[torch.Tensor],
    arguments: list[Any],
    results: Sequence[torch.Tensor],
    channels_last: bool = True,
) -> tvm.IRModule:
    """Return a module that calls ``operator``; ``results`` have the types of its results."""

    def graph(*given: relax.Expr) -> list[relax.Expr]:
        types = [relax.TensorType(list(r.shape), to_relax_dtype(r.dtype)) for r in results]
        spec = {
            "op": operator,
            "args": arguments,
            "kwargs": {},
            "results": list(range(len(results))),
            **({"channels_last": [0]} if channels_last else {}),
        }
        found = relax.BlockBuilder.current().emit(
            packed_call(ATEN_CALL, json.dumps(spec), list(given), relax.TupleType(types))
        )
        return [relax.TupleGetItem(found, i) for i in range(len(types))]

    return build_main(inputs, graph)


def _image(shape: Sequence[int], dtype: torch.dtype, offset: float) -> torch.Tensor:
    """Return an image with channels last, whose channels have different means and spreads."""
    generator = torch.Generator().manual_seed(int(offset))
    x = torch.randn(*shape, dtype=torch.float64, generator=generator)
    spread = torch.logspace(-2, 1, shape[-1], dtype=torch.float64)
    return (x * spread + offset * torch.arange(shape[-1])).to(dtype)


def _norm(operator: Any, dtype: torch.dtype, *given: Any) -> Sequence[torch.Tensor]:
    """Return the results of an ATen operator in ``dtype``, with images that have channels last."""
    cast = [g.to(dtype) if isinstance(g, torch.Tensor) else g for g in given]
    found = operator(*[g.permute(0, 3, 1, 2) if _is_image(g) else g for g in cast])
    return [r.permute(0, 2, 3, 1) if _is_image(r) else r for r in found]


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _no_worse(
    found: Sequence[torch.Tensor],
    operator: Any,
    dtype: torch.dtype,
    *given: Any,
) -> None:
    """Check that ``found`` is about as near to the results in float64 as those in float32 are."""
    exact, float32 = (_norm(operator, d, *given) for d in (torch.float64, torch.float32))
    for result, wanted, plain in zip(found, exact, float32, strict=False):
        assert result.dtype == (dtype if _is_image(result) else torch.float32)
        error = (result.double() - wanted).norm()
        least = (plain.to(result.dtype).double() - wanted).norm()
        assert error <= 1.5 * least + 2e-7 * wanted.norm()


_CASES = thinned(
    [
        ((2, 9, 10, 48), torch.bfloat16),  # several blocks of rows
        ((3, 40, 30, 8), torch.float16),
        ((2, 3, 3, 150), torch.float32),  # two tiles of columns, of which one is not full
        ((1, 2, 1, 5), torch.bfloat16),  # one column a thread; threads without rows
        ((4, 25, 25, 132), torch.float32),
    ],
    2,
)


@pytest.mark.parametrize(("shape", "dtype"), _CASES)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, channels = _image(shape, dtype, 3.0), shape[-1]
    vectors = [torch.randn(channels), torch.randn(channels), torch.randn(channels)]
    vectors.append(torch.rand(channels))
    given = [{"channels_last": 0}, *({"tensor": i} for i in range(1, 5)), True]
    floats = [torch.empty(channels)] * 4
    mod = _module(NORM, [x, *vectors], [*given, MOMENTUM, EPS], [x, *floats])
    rewritten, report = apply_pass(BatchNormsLast(), mod)
    assert report.rewrites == 1
    operator = aten._native_batch_norm_legit_functional
    found = run_module(rewritten, x, *vectors)
    _no_worse(found, operator, dtype, x, *vectors, True, MOMENTUM, EPS)


def test_a_norm_without_parameters() -> None:
    x = _image((2, 3, 5, 7), torch.bfloat16, 1.0)
    arguments = [{"channels_last": 0}, None, None, True, MOMENTUM, EPS]
    mod, report = apply_pass(BatchNormsLast(), _module(PLAIN, [x], arguments, [x]))
    assert report.rewrites == 1
    operator = aten._native_batch_norm_legit.no_stats
    given = (x, None, None, True, MOMENTUM, EPS)
    _no_worse(run_module(mod, x), operator, torch.bfloat16, *given)


@pytest.mark.parametrize(("shape", "dtype"), _CASES)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad, channels = _image(shape, dtype, 3.0), _image(shape, dtype, 0.0), shape[-1]
    weight, mean, variance = torch.randn(channels), torch.zeros(channels), torch.ones(channels)
    given = (x, weight, None, mean, variance, True, MOMENTUM, EPS)
    _, saved_mean, inverse = _norm(aten.native_batch_norm, torch.float64, *given)
    vectors = [weight, mean, variance, saved_mean.float(), inverse.float()]
    images = [{"channels_last": 0}, {"channels_last": 1}]
    named = [*images, *({"tensor": i} for i in range(2, 7)), True, EPS, [True] * 3]
    mod = _module(BACKWARD, [grad, x, *vectors], named, [x, weight, weight])
    rewritten, report = apply_pass(BatchNormsLast(), mod)
    assert report.rewrites == 1
    found = run_module(rewritten, grad, x, *vectors)
    last = (True, EPS, [True] * 3)
    _no_worse(found, aten.native_batch_norm_backward, dtype, grad, x, *vectors, *last)


def test_a_large_mean_and_an_outlier_lose_no_digits() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 30, 30, 4, dtype=torch.float64)
    x[..., 1] += 1000.0
    x[0, 0, 0, 2] = 1e4
    x = x.float()
    arguments = [{"channels_last": 0}, None, None, True, MOMENTUM, EPS]
    vector = torch.empty(4)
    mod, _ = apply_pass(BatchNormsLast(), _module(PLAIN, [x], arguments, [x, vector, vector]))
    _, mean, inverse = run_module(mod, x)
    exact = x.double().flatten(0, 2)
    wanted, rounding = exact.mean(0), torch.finfo(torch.float32).eps
    assert ((mean - wanted).abs() < 1e-5 * exact.std(0) + rounding * wanted.abs()).all()
    expected = (exact.var(0, correction=0) + EPS).rsqrt()
    torch.testing.assert_close(inverse.double(), expected, rtol=1e-5, atol=0)


def test_what_stays() -> None:
    x = torch.randn(2, 3, 5, 7)
    arguments = [{"channels_last": 0}, None, None, True, MOMENTUM, EPS]
    second = [{"tensor": 0}, *arguments[1:]]
    assert_changes_nothing(BatchNormsLast(), _module(PLAIN, [x], second, [x], False))
    assert_changes_nothing(BatchNormsLast(), _module(PLAIN, [x.double()], arguments, [x.double()]))
    evaluated = [*arguments[:3], False, *arguments[4:]]
    assert_changes_nothing(BatchNormsLast(), _module(PLAIN, [x], evaluated, [x]))


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.depthwise, self.other = nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu6(self.norm(self.first(x)))
        y = y + functional.hardswish(self.other(self.depthwise(y)))
        return y.mean((2, 3))


@pytest.mark.slow
def test_a_network_learns_under_autocast(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = BACKENDS["cuda"].graph_passes
    monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], graph_passes=passes))
    ours, x = _Network().train(), torch.randn(4, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        add_tvm_dispatch(ours, (x,), options={"only_if_faster": False})
    # Rounding to bfloat16 is chance: the errors of one sample differ by a third either way.
    errors = [_errors_under_autocast(ours, seed) for seed in range(5)]
    for name in errors[0]:
        found, plain, truth = (sum(each[name][i] ** 2 for each in errors) ** 0.5 for i in range(3))
        assert found <= 1.2 * plain + 1e-6 * truth, name
    names = " ".join(launch.kernel for called in kernels for launch in called.launches)
    assert "channel_statistics" in names
    assert "channel_gradients" in names


def _errors_under_autocast(ours: nn.Module, seed: int) -> dict[str, list[float]]:
    """Return the errors of what ``ours`` and eager PyTorch learn, and the norm of the exact."""
    torch.manual_seed(seed)
    eager, x = _Network().train(), torch.randn(4, 3, 12, 12)
    exact = copy.deepcopy(eager).double()
    ours.load_state_dict(eager.state_dict())
    ours.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        results = ours(x), eager(x)
    for result in (*results, exact(x.double())):
        result.square().sum().backward()
    found, plain, truth = map(_learned, (ours, eager, exact))
    return {
        name: [float(t.norm()) for t in (found[name] - value, plain[name] - value, value)]
        for name, value in truth.items()
    }


def _learned(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a module's parameters, and its buffers."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    return {name: value.double() for name, value in (gradients | buffers).items()}
