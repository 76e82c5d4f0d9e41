"""Forms of operators that code beside PyTorch leaves to its kernels run in exported functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tvmbridge_runtime
from torch import nn
from torch.nn import functional

import tvmbridge

Form = Callable[[torch.Tensor], Any]

_INTEGERS: Mapping[str, Form] = {
    "remainder": lambda i: i % 5,
    "remainder of negative": lambda i: (i - 4) % -3,
    "remainder of int32": lambda i: i.int() % 5,
    "int16 wraps": lambda i: i.short() * 9000 + i.short(),
    "int8 alpha": lambda i: torch.sub(i.char(), i.char() * 20, alpha=3),
    "uint8 wraps": lambda i: i.byte() * i.byte() * 9 - 200,
    "uint8 as floats": lambda i: i.byte().float() / 255,
    "uint8 as bool": lambda i: i.byte().bool(),
    "uint8 compared": lambda i: (i.byte() > 3) | (i.byte() == i),
    "int16 and int64": lambda i: i.short() < i - 1,
    "shifts": lambda i: (i << 3) - (i.int() >> 1),
    "narrow where": lambda i: torch.where(i.short() > 2, i.short(), i.short() + 1),
    "narrow gather": lambda i: i.short().gather(1, i),
    "narrow maximum": lambda i: torch.maximum(i.byte(), 9 - i.byte()),
    "sorted places": lambda i: torch.argsort(i.int() * 7 % 11, stable=True),
    "unsorted topk": lambda i: torch.topk(i * 7 % 11 + i / 10, 4, sorted=False)[0].sort()[0],
}
_FLOATS: Mapping[str, Form] = {
    "remainder": lambda x: x % 0.75,
    "remainder of tensors": lambda x: x % (x.flip(1) + 0.1),
    "floats to int8": lambda x: (x * 20).to(torch.int8),
    "argsort": lambda x: x.argsort(-1),
    "take_along": lambda x: x.take_along_dim(x.argsort(-1, descending=True), -1),
    "lgamma": lambda x: (x.abs() + 0.2).lgamma(),
    "round": lambda x: torch.round(x * 4) + torch.tensor(2.5).round(),
    "exp2 and log2": lambda x: x.exp2().log2() + x.abs().log10(),
    "tan and sinh": lambda x: x.tan() + x.sinh() + x.erfc(),
    "an unread draw": lambda x: (torch.rand_like(x), x + 1)[1],
    "an empty operand": lambda x: torch.cat([x, x[:, 10:]], 1),
    "hypot": lambda x: torch.copysign(torch.hypot(x, x.flip(1)), x),
}
_IMAGES: Mapping[str, Form] = {
    "ceil": lambda x: functional.max_pool2d(x, 3, 2, ceil_mode=True),
    "places": lambda x: functional.max_pool2d(x, 3, 2, 1, dilation=2, return_indices=True),
    "three dimensions": lambda x: functional.max_pool3d(x, 2, 2, (0, 1, 1)),
    "adaptive": lambda x: functional.adaptive_max_pool2d(x, (3, 4), return_indices=True),
    "of nan": lambda x: functional.max_pool2d(x / x.relu(), 3, return_indices=True),
}


_SIGNALS = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_COMPLEX: Mapping[str, Form] = {
    "rotation": lambda x: torch.view_as_real(_pairs(x) * torch.polar(x[:, 16:], x[:, :16])),
    "of integers": lambda x: torch.add(_pairs(x), _bytes(x), alpha=9).real - (_bytes(x) * 2j).imag,
    "joined with integers": lambda x: torch.cat([_pairs(x), _bytes(x)]).imag,
    "chosen from integers": lambda x: torch.where(_bytes(x) > 99, _pairs(x), _bytes(x)).imag,
    "padded with a number": lambda x: functional.pad(_pairs(x), (1, 2), value=3.0).imag,
    "imaginary bools": lambda x: torch.complex(x * 0, x.relu()).bool(),
}
_MORE_COMPLEX: Mapping[str, Form] = {
    "large exponentials": lambda x: torch.exp(torch.complex(x.abs() * 1e6, x * 0)).imag,
    "inverse": lambda x: torch.fft.irfft(torch.fft.rfft(x), norm="forward"),
    "fft": lambda x: torch.fft.fft2(x).imag,
    "real fft": lambda x: torch.fft.rfft(x, norm="ortho").angle(),
    "many numbers": lambda x: torch.fft.irfft(_of_many(x) * (0.5 - 1j), n=300),
    "quotients": lambda x: ((_pairs(x) / _pairs(x * 3)).real, (1 / _pairs(x)).imag),
    "products": lambda x: (
        (_pairs(x) @ _pairs(x).mH).real,
        torch.bmm(_pairs(x)[None], _pairs(x).T[None]).imag,
    ),
    "moves": lambda x: torch.cat([_pairs(x), _pairs(x).conj()]).T.flip(0).unbind(1)[4].imag,
    "functions": lambda x: (torch.exp(_pairs(x) - 1j).real, (_pairs(x).mean(1) ** 2).imag),
    "copies": lambda x: (x.to(torch.complex64) * 2j).imag.double(),
    "quotients by zero": lambda x: torch.view_as_real(_pairs(x) / (_pairs(x) * 0)),
}


def _of_many(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(torch.cat([x.flatten()] * 4)[:300])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :16].abs() * 99).to(torch.uint8)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.view(3, 16, 2))


class Forms(nn.Module):
    """A module that returns the result of each form."""

    def __init__(self, forms: Mapping[str, Form]) -> None:
        super().__init__()
        self.forms = forms

    def forward(self, x: torch.Tensor) -> list[Any]:
        return [form(x) for form in self.forms.values()]


@pytest.mark.parametrize(
    ("forms", "sample"),
    [
        (_INTEGERS, torch.arange(30).view(3, 10) % 10),
        (_FLOATS, torch.randn(3, 10, generator=torch.Generator().manual_seed(0))),
        (_IMAGES, torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))),
        (_COMPLEX, _SIGNALS),
        pytest.param(_MORE_COMPLEX, _SIGNALS, marks=pytest.mark.slow),
    ],
    ids=["integers", "floats", "images", "complex", "more complex"],
)
def test_forms(forms: Mapping[str, Form], sample: torch.Tensor, tmp_path: Path) -> None:
    module = Forms(forms).eval()
    path = tvmbridge.export(module, sample, tmp_path / "model.tvmb")
    results = tvmbridge_runtime.load(path)(sample.numpy())
    for name, found, expected in zip(forms, results, module(sample), strict=True):
        pairs = (
            zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        )
        for ours, theirs in pairs:
            assert ours.dtype == theirs.numpy().dtype, name
            numpy.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6, err_msg=name)


class Spectrum(nn.Module):
    """A filter of a signal with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 9, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.einsum("bk,ck->bck", torch.fft.rfft(x), self.weight))


@pytest.mark.slow
def test_complex_weights_are_pairs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Spectrum().eval(), torch.randn(3, 16)
    path = tvmbridge.export(module, x, tmp_path / "model.tvmb")
    assert tvmbridge.compare_export(module, x, path).ok


def test_complex_operators_without_parts_are_refused(tmp_path: Path) -> None:
    module = Forms({"tanh": lambda x: torch.tanh(torch.fft.fft(x)).real})
    with pytest.raises(tvmbridge.ExportError, match=r"aten\.tanh\.default"):
        tvmbridge.export(module.eval(), torch.randn(9), tmp_path / "model.tvmb")


def test_an_integer_divided_by_what_may_be_zero_is_refused(tmp_path: Path) -> None:
    module = Forms({"remainder": lambda i: i % (i - 3)})
    with pytest.raises(tvmbridge.ExportError, match=r"aten\.remainder\.Tensor"):
        tvmbridge.export(module.eval(), torch.arange(9), tmp_path / "model.tvmb")
