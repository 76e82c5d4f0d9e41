"""Operators for recurrent layers: finite differences, foretold shapes, refusals at a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tvmbridge.graph_capture.trace.recurrent_layers  # noqa: F401  (its operators)
from tvmbridge.graph_capture.trace.recurrent_onednn import onednn_lstm_layer, workspace_size

STEPS, BATCH, SIZE, PROJECTED = 3, 2, 4, 3
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _arguments(kind: str, *, whole: bool, batch: int = BATCH) -> tuple[torch.Tensor | None, ...]:
    """Arguments of the operator; ``whole``: with what it may go without."""
    torch.manual_seed(0)
    rows = GATES[kind] * SIZE
    bias = _numbers(rows) if whole else None
    if kind != "lstm":
        hidden, weight = _numbers(batch, SIZE), _numbers(rows, SIZE)
        return _numbers(STEPS, batch, rows), hidden, weight, bias
    projected = PROJECTED if whole else SIZE
    projection = _numbers(PROJECTED, SIZE) if whole else None
    states = _numbers(batch, projected), _numbers(batch, SIZE)
    return _numbers(STEPS, batch, rows), *states, _numbers(rows, projected), bias, projection


def _operator(kind: str) -> Any:
    return getattr(torch.ops.tvmbridge, f"{kind}_steps").default


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", GATES)
def test_gradients_are_those_of_finite_differences(kind: str, whole: bool) -> None:
    results = 3 if kind == "lstm" else 2

    def function(*args: Any) -> Any:
        return _operator(kind)(*args)[:results]

    assert torch.autograd.gradcheck(function, _arguments(kind, whole=whole))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", GATES)
def test_results_have_the_shapes_that_are_foretold(kind: str, whole: bool) -> None:
    for batch in (0, BATCH):
        args = _arguments(kind, whole=whole, batch=batch)
        torch.library.opcheck(_operator(kind), args, test_utils=("test_schema", "test_faketensor"))


def _of_onednn(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(STEPS, BATCH, 5), *[(BATCH, SIZE)] * 2, (4 * SIZE, 5), (4 * SIZE, SIZE)]
    shapes += [(4 * SIZE,), (4 * SIZE,)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_s_results_have_the_shapes_and_dtypes_that_are_foretold(dtype: torch.dtype) -> None:
    args = _of_onednn(dtype)
    size = workspace_size(args[0], args[1], args[5])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(onednn_lstm_layer, (*args, size), test_utils=tests)
    results = onednn_lstm_layer(*args, size)
    backward = torch.ops.tvmbridge.onednn_lstm_layer_backward.default
    given = (torch.ones_like(results[0]), None, None, *args, *results)
    torch.library.opcheck(backward, given, test_utils=tests)


def test_a_workspace_of_another_size_is_refused() -> None:
    args = _of_onednn()
    size = workspace_size(args[0], args[1], args[5])
    with pytest.raises(RuntimeError, match="dispatch the module again"):
        onednn_lstm_layer(*args, size + 1)
