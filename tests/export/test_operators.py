"""Operators that PyTorch's kernels serve in other code have loops in exported functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import tvmbridge_runtime
from torch.nn import functional

import tvmbridge
from tests.export.test_forms import Form
from tests.export.test_forms import test_forms as _agree_with_eager
from tests.thinned import thinned

_NUMBERS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
_NAN = torch.tensor([[0.5, float("nan"), -1.0], [float("inf"), 0.0, 2.0]])
_IMAGES = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0))
_EDGES = torch.tensor([-1.0, 0.0, 0.0, 1.5])
_PLACES, _ENDS = torch.tensor([0, 2, 3, 2, 1, 2]), torch.tensor([0, 1, 3, 6])
_SCALES = torch.tensor([0.25, 0.5, 0.125, 0.3])

_REDUCTIONS: Mapping[str, Form] = {
    "largest": lambda x: (x.max(), x.min(), (x > 0).max(), (x > 0).min()),
    "largest of bytes": lambda x: ((x * 40).char().max(), (x * 40).char().max(1).values),
    "places of bytes": lambda x: (x * 40).char().min(0).indices,
    "products": lambda x: (x.prod(), x.prod(1), (x * 3).int().prod(0, keepdim=True)),
    "products along": lambda x: (x.cumprod(0), (x * 3).int().cumprod(-1)),
    "sums of bytes": lambda x: (x.abs() * 40).byte().sum(1),
    "medians": lambda x: (x.median(), *x.median(0), *x.kthvalue(2, 1)),
    "floor": lambda x: x // x.flip(0),
    "powers": lambda x: (x * 4).int() ** 3,
    "signs": lambda x: torch.signbit(x),
    "decimals": lambda x: (x.round(decimals=1), (x * 99).round(decimals=-1)),
    "bits": lambda x: ((x * 40).char() & 6, (x * 40).char() | 1, (x * 40).char() ^ 5),
}
_OF_NAN: Mapping[str, Form] = {
    "largest": lambda x: (x.max(), x.min(), x.amax(1)),
    "medians": lambda x: (x.median(), x.median(1).values, x.median(1).indices[1:]),
    "searches": lambda x: torch.bucketize(x, _EDGES),
    "searches on the right": lambda x: torch.bucketize(x, _EDGES, right=True, out_int32=True),
    "searches in nothing": lambda x: torch.searchsorted(_EDGES[:0], x),
    "a grid": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 3, 0, 9),
    "searches in rows": lambda x: torch.searchsorted(x.nan_to_num(0.1).sort(1)[0], x),
}
_EMPTY: Mapping[str, Form] = {
    "a number": lambda x: x[0, 0].cumprod(0),
    "slices": lambda x: (x[:0], x[:, :0].relu(), x[:0].softmax(1)),
    "sums": lambda x: (x[:0].sum(0), x[:0].prod(0), x[:0].mean(0), (x[:0] > 0).all(0)),
    "matrix products": lambda x: (x[:0] @ x.T, x[:, :0] @ x[:, :0].T),
    "images": lambda x: functional.conv2d(x[:0].view(0, 1, 2, 3), torch.ones(4, 1, 2, 2)),
}
_WHOLE: Mapping[str, Form] = {
    "classes": lambda x: functional.one_hot((x > 0).long(), 3),
    "products of bytes": lambda x: torch.bmm((x * 9).int()[None], (x * 9).int().T[None]),
    "a grid": lambda x: torch.fake_quantize_per_tensor_affine(_halfway(x), 0.25, 3, -128, 127),
    "a grid for each row": lambda x: torch.fake_quantize_per_channel_affine(
        _halfway(x), _SCALES, torch.arange(4, dtype=torch.int32), 0, 0, 255
    ),
    "a grid with fractions": lambda x: torch.fake_quantize_per_channel_affine(
        _halfway(x), _SCALES, torch.arange(4) * 1.25, 0, 0, 255
    ),
    "taken": lambda x: x.take(torch.tensor([[1, 9], [-1, 3]])),
    "reduced by index": lambda x: torch.zeros(4, 6).scatter_reduce(
        0, (x > 0).long(), x, "amax", include_self=False
    ),
    "products by index": lambda x: x.scatter_reduce(1, (x > 0).long() * 3, x, "prod"),
    "means by index": lambda x: x.scatter_reduce(0, (x > 0).long(), x, "mean"),
}
_BAGS: Mapping[str, Form] = {
    mode: lambda x, mode=mode: (  # type: ignore[misc]
        functional.embedding_bag(_PLACES, x, torch.tensor([0, 0, 3]), mode=mode),
        functional.embedding_bag(
            _PLACES, x, _ENDS, mode=mode, padding_idx=2, include_last_offset=True
        ),
        functional.embedding_bag(_PLACES.view(2, 3), x, mode=mode),
    )
    for mode in ("sum", "mean", "max")
}
_HALVES: Mapping[str, Form] = {
    "largest": lambda x: functional.max_pool2d(x.bfloat16(), 2).float(),
    "places": lambda x: functional.max_pool2d(x.half(), 2, return_indices=True)[1],
    "means": lambda x: functional.avg_pool2d(x.half(), 3, 1, 1),
    "adaptive": lambda x: functional.adaptive_avg_pool2d(x.half(), (2, 3)),
}
_RESIZED: Mapping[str, Form] = {
    "one dimension": lambda x: functional.interpolate(x.flatten(2), 13, mode="linear"),
    "three dimensions": lambda x: functional.interpolate(x[None], (7, 3, 9), mode="trilinear"),
    "cubes": lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
    "a grid": lambda x: functional.grid_sample(x, x[:, :2].movedim(1, 3), align_corners=False),
    "borders": lambda x: functional.grid_sample(
        x, x[:, :2].movedim(1, 3) * 2, padding_mode="reflection", align_corners=True
    ),
}
_WINDOW = torch.hann_window(16)
_SIGNALS: Mapping[str, Form] = {
    "back": lambda x: torch.istft(_spectrum(x), 16, 4, window=_WINDOW),
    "of a length": lambda x: torch.istft(_spectrum(x), 16, 4, window=_WINDOW, length=60),
}


def _halfway(x: torch.Tensor) -> torch.Tensor:
    """Return multiples of 1/8, of which many are halfway between numbers of a grid."""
    return (x * 16).round() / 8


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x, 16, 4, window=_WINDOW, return_complex=True)


@pytest.mark.parametrize(
    ("forms", "sample"),
    [
        pytest.param(_REDUCTIONS, _NUMBERS, marks=pytest.mark.slow),
        (_OF_NAN, _NAN),
        pytest.param(_EMPTY, _NUMBERS, marks=pytest.mark.slow),
        pytest.param(_WHOLE, _NUMBERS, marks=pytest.mark.slow),
        (_BAGS, _NUMBERS),
        pytest.param(_HALVES, _IMAGES, marks=pytest.mark.slow),
        pytest.param(_RESIZED, _IMAGES, marks=pytest.mark.slow),
        pytest.param(_SIGNALS, torch.randn(2, 64), marks=pytest.mark.slow),
    ],
    ids=["reductions", "nan", "empty", "whole", "bags", "halves", "resized", "signals"],
)
def test_operators(forms: Mapping[str, Form], sample: torch.Tensor, tmp_path: Path) -> None:
    _agree_with_eager(forms, sample, tmp_path)


@pytest.mark.parametrize("mode", thinned(["sum", "mean", "max"], 3))
def test_bags_beyond_the_table_are_nan(mode: str, tmp_path: Path) -> None:
    bag = torch.nn.EmbeddingBag(5, 3, mode=mode).eval()
    path = tvmbridge.export(bag, torch.tensor([[0, 1]] * 3), tmp_path / "model.tvmb")
    found = tvmbridge_runtime.load(path)(torch.tensor([[0, 9], [0, -1], [-1, 9]]).numpy())
    assert torch.from_numpy(found).isnan().all()
