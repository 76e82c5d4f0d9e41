"""Complex numbers inside a module: values and gradients equal eager's; as outputs, refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report


class _Inside(nn.Module):
    """A module with complex rotations, transforms, and a complex argument without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, dtype=torch.float64))
        angles = torch.arange(12, dtype=torch.float64).view(3, 4)
        self.register_buffer("factors", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("turned", self.factors.t())

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        x = x * self.weight
        pairs = torch.view_as_complex(x.reshape(3, 4, 2))
        rotated = torch.view_as_real(pairs * self.factors).flatten(1)
        filtered = torch.fft.irfft(torch.fft.rfft(x) * z.conj()[None], n=8)
        spectrum = torch.stft(
            x.reshape(1, -1), 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True
        )
        phases = torch.exp(1j * x[:, :3]) @ self.turned[:3].conj()
        empty = torch.complex(x[:0], x[:0]).abs()
        mixed = [phases.real, phases.conj().imag, spectrum.abs().log1p(), spectrum.angle().cos()]
        return rotated, filtered, mixed, torch.fft.fft2(x).real, empty


def _leaves(results: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(results)


def test_values_and_gradients_are_those_of_eager_pytorch() -> None:
    plain = _Inside()
    module = copy.deepcopy(plain)
    x = torch.randn(3, 8, dtype=torch.float64)
    z = torch.randn(5, dtype=torch.complex128)
    add_tvm_dispatch(module, (x.requires_grad_(), z))
    for step in (1, 2):
        found = []
        for called in (module, plain):
            given = (x.detach() * step).requires_grad_()
            # A conjugated view: its memory holds the numbers before conjugation.
            rows = torch.stack([z, z * step], 1).conj()[:, step - 1]
            outputs = _leaves(called(given, rows))
            total = sum((o * (i + 1)).sin().sum() for i, o in enumerate(outputs))
            assert isinstance(total, torch.Tensor)
            gradients = torch.autograd.grad(total, (given, called.weight))
            found.append([o.detach() for o in outputs] + list(gradients))
        torch.testing.assert_close(*found)
        with torch.no_grad():
            for m in (module, plain):
                m.factors.mul_(1j)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {})


class _Refused(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        if case == "learned":
            self.learned = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("kept", torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        if self.case == "learned":
            return (x * self.learned).real
        if self.case == "kept":
            self.kept.mul_(2)
            return x * 2
        return torch.fft.fft(x)


REASONS = {
    "returned": r"the result \w+ is of torch.complex64",
    "kept": r"the result \w+ is of torch.complex64",
    "learned": r"learned is of torch.complex64 and requires a gradient",
}


@pytest.mark.parametrize("case", REASONS)
def test_complex_numbers_at_the_border_are_refused(case: str) -> None:
    with pytest.raises(BridgeError, match=REASONS[case]):
        add_tvm_dispatch(_Refused(case), torch.ones(3))


def test_complex_weights_that_learn_are_served_in_inference() -> None:
    module = _Refused("learned").eval()
    x = torch.randn(3)
    ours = add_tvm_dispatch(copy.deepcopy(module), x)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), module(x))
    assert (dispatch_report(ours).tvm_calls, dispatch_report(ours).fallbacks) == (1, {})
    ours(x).sum().backward()
    module(x).sum().backward()
    torch.testing.assert_close(ours.learned.grad, module.learned.grad)
    (reason,) = dispatch_report(ours).fallbacks
    assert "learned is of torch.complex64 and requires a gradient" in reason
    with torch.no_grad():
        ours.learned.mul_(1 + 2j)
        module.learned.mul_(1 + 2j)
        torch.testing.assert_close(ours(x), module(x))
    assert dispatch_report(ours).tvm_calls == 2


class _AsReal(nn.Module):
    """Keeps its complex weight as real numbers, as the refusal of complex ones advises."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.learned), n=4)


def test_a_complex_weight_kept_as_real_numbers_is_trained() -> None:
    module, x = _AsReal(), torch.randn(5, 4)
    ours = add_tvm_dispatch(copy.deepcopy(module), x)
    for each in (module, ours):
        each(x).square().sum().backward()
    torch.testing.assert_close(ours.learned.grad, module.learned.grad)
    assert dispatch_report(ours).tvm_calls == 1
    with pytest.raises(BridgeError, match=r"torch\.view_as_complex in forward"):
        add_tvm_dispatch(_Refused("learned"), torch.ones(3))
