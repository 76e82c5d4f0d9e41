"""Code for images of any size: windows, interpolations and padding against float64 PyTorch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from tests.symbolic.test_traced import Calls
from tvmbridge import add_tvm_dispatch, dispatch_report

_SIZES = ((12, 9), (9, 12), (20, 20), (13, 31), (22, 8))


class _Joined(nn.Module):
    """A convolution of images at half their size, brought back and joined with the images."""

    def __init__(self, back: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.back = nn.Conv2d(3, 4, 3, padding=1), back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.back(self.conv(functional.max_pool2d(x, 2)), x)], 1)


def _padded(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = functional.interpolate(y, scale_factor=2)
    return functional.pad(y, (0, x.shape[3] - y.shape[3], 0, x.shape[2] - y.shape[2]))


class _Unshuffled(nn.Module):
    """Images padded to even sides, with the pixels of each square of four as channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even = functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return functional.pixel_unshuffle(even, 2)


_MODULES: dict[str, Callable[[], nn.Module]] = {
    "convolution and pooling": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 4, 3, 2, 1)
    ),
    "mean of windows": lambda: nn.AvgPool2d(2),
    "padded to the image": lambda: _Joined(_padded),
    "resized to the image": lambda: _Joined(
        lambda y, x: functional.interpolate(y, size=x.shape[2:], mode="bilinear")
    ),
    "half as many again": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "nearest of a fixed size": lambda: nn.Upsample(size=(7, 10)),
    "corners of a fixed size": lambda: nn.Upsample(
        size=(7, 10), mode="bilinear", align_corners=True
    ),
    "padded to a multiple": _Unshuffled,
}
_QUICK = "convolution and pooling", "mean of windows"
_CASES = [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in _MODULES]


def _dims() -> Any:
    return ({2: Dim("height", min=4), 3: Dim("width", min=4)},)


def _served(module: nn.Module, images: Sequence[torch.Tensor], dynamic_shapes: Any) -> None:
    exact = copy.deepcopy(module).double()
    add_tvm_dispatch(module, dynamic_shapes=dynamic_shapes, on_fallback="silent")
    for image in images:
        with torch.no_grad():
            found, expected = module(image), exact(image.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    report = dispatch_report(module)
    assert report.tvm_calls == len(images), report.fallbacks


@pytest.mark.parametrize("name", _CASES)
def test_images_of_any_size_are_served(name: str) -> None:
    torch.manual_seed(0)
    module = _MODULES[name]().eval()
    _served(module, [torch.randn(2, 3, *size) for size in _SIZES], _dims())


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_gradients_of_images_of_any_size(name: str) -> None:
    torch.manual_seed(0)
    module = _MODULES[name]()
    exact = copy.deepcopy(module).double()
    add_tvm_dispatch(module, dynamic_shapes=_dims(), on_fallback="silent")
    for size in _SIZES:
        image = torch.randn(2, 3, *size)
        found, expected = image.requires_grad_(), image.detach().double().requires_grad_()
        ours, theirs = module(found), exact(expected)
        weights = torch.randn(theirs.shape)
        (ours * weights).sum().backward()
        (theirs * weights).sum().backward()
        assert found.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)
    report = dispatch_report(module)
    assert report.tvm_calls == len(_SIZES), report.fallbacks


def _resized(x: torch.Tensor, **how: Any) -> torch.Tensor:
    return functional.interpolate(x, **how)


_STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # 3 columns become 3, for which ATen leaves the factor out.
    "nearest": lambda x: _resized(x, scale_factor=(1.0, 1.25)),
    # 3 columns become 6, for which ATen halves the places.
    "nearest, doubled": lambda x: _resized(x, scale_factor=(1.0, 2.25)),
    "bilinear": lambda x: _resized(x, scale_factor=(1.0, 1.25), mode="bilinear"),
    # One row stays one, which has no distance between its corners.
    "corners": lambda x: _resized(
        x, size=[(n + 1) // 2 for n in x.shape[2:]], mode="bilinear", align_corners=True
    ),
}


_QUICK_STEP = "nearest, doubled"


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [n if n == _QUICK_STEP else pytest.param(n, marks=pytest.mark.slow) for n in _STEPS]
)
def test_interpolation_at_the_sizes_where_aten_has_another_step(name: str) -> None:
    torch.manual_seed(0)
    module, function = Calls(_STEPS[name]), _STEPS[name]
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for size in ((20, 33), (23, 40), (17, 29), (20, 3), (1, 40)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(module(x), function(x), rtol=1e-4, atol=1e-4)
    assert dispatch_report(module).tvm_calls >= 4


@torch.no_grad()
def test_an_infinity_beside_an_element_of_an_image_that_keeps_its_size() -> None:
    module = Calls(lambda x: _resized(x, size=(6, 9), mode="bilinear"))
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for width in (33, 40, 9):
        x = torch.arange(2.0 * 3 * 6 * width).view(2, 3, 6, width)
        x[:, :, 2, 5] = torch.inf
        found, expected = module(x), functional.interpolate(x, size=(6, 9), mode="bilinear")
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert dispatch_report(module).tvm_calls == 3


def test_lengths_of_max_pool1d_with_ceil_mode() -> None:
    lengths = (12, 9, 10, 31, 40)
    module = nn.MaxPool1d(3, 2, 1, ceil_mode=True)
    rows = ({2: Dim("length", min=4)},)
    _served(module, [torch.randn(2, 3, length) for length in lengths], rows)


def test_square_images_have_a_symbol_for_each_side(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tvmbridge")
    module = nn.Conv2d(3, 4, 3, 2, 1)
    sizes = ((2, 12, 12), (3, 13, 13), (4, 14, 14), (5, 30, 13), (3, 12, 50))
    _served(module, [torch.randn(b, 3, h, w) for b, h, w in sizes], "auto")
    assert sum("any size from" in message for message in caplog.messages) == 1


def test_images_that_must_be_square_are_served() -> None:
    module = Calls(lambda x: x + x.transpose(2, 3))
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for number in (12, 13, 14, 15, 30):
        x = torch.randn(2, 3, number, number)
        torch.testing.assert_close(module(x), x + x.transpose(2, 3))
    # The second call, which asks for a symbol for each side, is the one that is not served.
    assert dispatch_report(module).tvm_calls >= 4
