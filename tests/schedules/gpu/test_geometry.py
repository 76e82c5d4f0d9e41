"""Launch geometry: values by channel must not force one block to compute a whole image."""

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.relax import op

from tests.schedules.gpu.emulator import EmulatedFunction, Launch, run_all


def _launches(patch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    genuine = EmulatedFunction.__call__

    def noted(self: EmulatedFunction, *tensors: object) -> None:
        found.extend(self.lowered.launches)
        genuine(self, *tensors)

    patch.setattr(EmulatedFunction, "__call__", noted)
    return found


def test_a_norm_by_channels_is_one_kernel_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _launches(monkeypatch)
    x, scale, shift = torch.randn(2, 16, 40, 40), torch.rand(16) + 0.5, torch.randn(16)

    def graph(v: relax.Expr, s: relax.Expr, t: relax.Expr) -> relax.Expr:
        factor = op.rsqrt(op.add(s, relax.const(1e-5, "float32")))
        by = op.reshape(op.multiply(factor, t), (1, 16, 1, 1))
        return op.nn.relu(op.add(op.multiply(v, by), op.reshape(op.negative(t), (1, 16, 1, 1))))

    (result,) = run_all(graph, x, scale, shift)
    by = ((scale.double() + 1e-5).rsqrt() * shift)[:, None, None]
    exact = (x.double() * by - shift.double()[:, None, None]).relu()
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
    assert len(launches) == 1
    assert launches[0].blocks * launches[0].threads >= x.numel() // 4


def test_long_rows_after_a_reduction_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _launches(monkeypatch)
    x = torch.randn(3, 20000)
    (result,) = run_all(lambda v: op.multiply(op.tanh(v), op.sum(v, [1], keepdims=True)), x)
    exact = x.double().tanh() * x.double().sum(1, keepdim=True)
    torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)
    assert max(launch.blocks for launch in launches) >= x.numel() // 1024
