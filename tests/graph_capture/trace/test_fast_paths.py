"""Fast paths of attention modules, which PyTorch takes without autograd: results equal eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, UnsupportedOperatorError, add_tvm_dispatch, dispatch_report

ENDS = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()  # padding at row ends
WHOLE = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()  # a row is all padding
BLIND = torch.eye(4).bool().index_fill(0, torch.tensor(2), True)  # the third row is fully masked


def _sample() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)


def _layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64, **options)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(_layer(), 1)
        self.register_buffer("blind", BLIND)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.attention(x, x, x, attn_mask=self.blind, need_weights=False)[0]
        return x, self.encoder(x.nan_to_num(), src_key_padding_mask=mask)


class SelfAttention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(x, x, x, **options)


def _agree(module: nn.Module, plain: nn.Module, calls: list[dict[str, Any]]) -> None:
    for call in calls:
        with torch.no_grad():
            ours, theirs = module(_sample(), **call), plain(_sample(), **call)
        torch.testing.assert_close(ours, theirs, equal_nan=True, check_stride=True)
    report = dispatch_report(module)
    assert report.tvm_calls == len(calls)
    assert not report.fallbacks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_and_rows_that_see_nothing() -> None:
    plain = Attentive().eval()
    module = copy.deepcopy(plain)
    add_tvm_dispatch(module, _sample(), sample_kwargs={"mask": ENDS})
    _agree(module, plain, [{"mask": mask} for mask in (ENDS, ENDS.flip(1), WHOLE)])


def test_an_encoder_that_does_not_look_at_its_mask_is_refused() -> None:
    encoder = nn.TransformerEncoder(_layer(), 1, mask_check=False).eval()
    with pytest.raises((CaptureError, UnsupportedOperatorError), match="mask_check=False"):
        add_tvm_dispatch(encoder, _sample(), sample_kwargs={"src_key_padding_mask": ENDS})


NUMBERS = torch.zeros(3, 4, dtype=torch.float64).masked_fill(ENDS, -torch.inf)
MODULES: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "gelu": (lambda: _layer(activation="gelu", norm_first=True), [{"src_mask": BLIND}]),
    "masks": (_layer, [{"src_mask": BLIND, "src_key_padding_mask": ENDS}]),
    "numbers": (_layer, [{"src_mask": torch.rand(4, 4, dtype=torch.float64)}]),
    "frozen": (lambda: _layer().requires_grad_(False), [{"src_key_padding_mask": WHOLE}]),
    "weights": (SelfAttention, [{"attn_mask": BLIND, "key_padding_mask": ENDS}]),
    "weights of heads": (SelfAttention, [{"attn_mask": BLIND, "average_attn_weights": False}]),
    "no weights": (SelfAttention, [{"key_padding_mask": WHOLE, "need_weights": False}]),
    "encoder": (
        lambda: nn.TransformerEncoder(_layer(), 2, norm=nn.LayerNorm(4).double()),
        [{"src_key_padding_mask": ENDS}, {"src_key_padding_mask": NUMBERS}],
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODULES)
def test_every_path(name: str) -> None:
    make, calls = MODULES[name]
    plain = make().eval()
    module = copy.deepcopy(plain)
    for call in calls:
        # The second call form is compiled while the module is already dispatched.
        add_tvm_dispatch(module, _sample(), sample_kwargs=call)
    _agree(module, plain, calls)


class _Masked(nn.Module):
    """A transformer that compares its mask with a causal one, which a trace cannot evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = self.whole.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.whole(x.flip(1), x, src_mask=mask, tgt_mask=causal)


def test_masks_are_causal_or_not() -> None:
    plain = _Masked().eval()
    module, x = copy.deepcopy(plain), _sample()
    causal = torch.ones(4, 4).triu(1).bool()
    with torch.no_grad():
        add_tvm_dispatch(module, (x, causal))
        for mask in (causal, causal.flip(0, 1)):
            torch.testing.assert_close(module(x, mask), plain(x, mask))
    assert dispatch_report(module).tvm_calls == 2
