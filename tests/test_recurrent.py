"""Recurrent layers in float32, for which PyTorch has kernels of oneDNN, trained like eager's."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.errors import UnsupportedOperatorError

_OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
    {"num_layers": 2, "dropout": 0.4, "proj_size": 3},
]


def _assert_trains_like_eager(options: dict[str, Any], joint: Literal["auto", "aot"]) -> None:
    torch.manual_seed(0)
    module, x = nn.LSTM(5, 4, **options), torch.randn(2, 2, 5)
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x, options=CompileOptions(joint=joint))
    results = []
    for trained in (module, other):
        torch.manual_seed(1)
        output, (hidden, cell) = trained(x)
        loss = output.square().sum() + hidden.sum() + (cell * 2).sum()
        results.append((output, hidden, cell, *torch.autograd.grad(loss, trained.parameters())))
    torch.testing.assert_close(*results)
    assert dispatch_report(module).tvm_calls == 1


def test_an_lstm_over_data_trains_like_eager() -> None:
    _assert_trains_like_eager({}, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("options", _OPTIONS)
@pytest.mark.parametrize("joint", ["auto", "aot"])
def test_lstms_train_like_eager(options: dict[str, Any], joint: Literal["auto", "aot"]) -> None:
    _assert_trains_like_eager(options, joint)


class _OneDNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(1, 2, 4)
        layer = torch.ops.aten.mkldnn_rnn_layer.default
        flags = (False, [], 2, 4, 1, True, False, False, True)
        return layer(x, *self.lstm.parameters(), state, state, *flags)[0]


def test_the_gradient_of_onednn_s_layer_is_refused_for_its_workspace() -> None:
    with pytest.raises(UnsupportedOperatorError, match="workspace"):
        add_tvm_dispatch(_OneDNN(), torch.randn(3, 2, 4))
