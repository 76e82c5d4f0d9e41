"""LSTMs that keep oneDNN's workspace: gradients equal eager's to the bit, with one forward run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.thinned import covering
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.trace.recurrent_workspace import LSTM_LAYER, workspace_length

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)
FORMS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True, "num_layers": 2},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]
STEPS, BATCH, FEATURES, SIZE = 6, 3, 5, 8
NAMES = {"tvmbridge.lstm_layer.default", "tvmbridge.lstm_layer_backward.default"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _off() -> AbstractContextManager[None]:
    return torch.backends.mkldnn.flags(enabled=False)


def _gradients(module: nn.Module, x: torch.Tensor, used: int | None) -> list[Any]:
    """Return outputs, and gradients of the output ``used`` (None: of all outputs)."""
    x = x.clone().requires_grad_()
    output, (hidden, cell) = module(x)
    outputs = [output, hidden, cell]
    differentiated = outputs if used is None else [outputs[used]]
    loss = sum((torch.cos(o) * (i + 1)).sum() for i, o in enumerate(differentiated))
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True)]


@pytest.mark.parametrize(("frozen", "form"), covering([False, True], FORMS))
def test_gradients_are_those_of_eager_bit_by_bit(form: dict[str, Any], frozen: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.LSTM(FEATURES, SIZE, **form), torch.randn(STEPS, BATCH, FEATURES)
    if frozen:
        for parameter in list(module.parameters())[::2]:
            parameter.requires_grad_(False)
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x.clone().requires_grad_())
    for used in (None, 0, 1, 2):
        ours, eager = (_gradients(each, x, used) for each in (module, other))
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert set(dispatch_report(module).aten_calls) >= NAMES


def _arguments(bidirectional: bool = True) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = nn.LSTM(FEATURES, SIZE, bidirectional=bidirectional)
    states = [torch.randn(2 if bidirectional else 1, BATCH, SIZE) for _ in range(2)]
    x = torch.randn(STEPS, BATCH, FEATURES)
    length = workspace_length(torch.lstm, x, states, None)
    assert length > 0
    weights = [p.detach() for p in module.parameters()]
    return x, states, weights, True, bidirectional, False, length


def _differentiated(
    args: tuple[Any, ...],
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[torch.Tensor]:
    x, states, weights, *flags = args
    leaves = [t.detach().clone().requires_grad_() for t in (x, *states, *weights)]
    with forward():
        results = LSTM_LAYER(leaves[0], leaves[1:3], leaves[3:], *flags)
    loss = sum((torch.cos(r) * (i + 1)).sum() for i, r in enumerate(results[:3]))
    with backward():
        return list(torch.autograd.grad(loss, leaves))


def _exactly(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return PyTorch's gradients, computed in float64."""
    x, states, weights, biased, bidirectional, *_ = args
    leaves = [t.double().requires_grad_() for t in (x, *states, *weights)]
    flags = (biased, 1, 0.0, False, bidirectional, False)
    results = torch.lstm(leaves[0], leaves[1:3], leaves[3:], *flags)
    loss = sum((torch.cos(r) * (i + 1)).sum() for i, r in enumerate(results))
    return [g.float() for g in torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_forward_does_not_run_again(bidirectional: bool) -> None:
    args = _arguments(bidirectional)
    with torch.profiler.profile() as found:
        _differentiated(args)
    counts = {event.key: event.count for event in found.key_averages()}
    directions = 2 if bidirectional else 1
    for name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        assert counts[f"aten::{name}"] == directions


@pytest.mark.parametrize("missing", ["forward", "backward", "length"])
def test_without_a_workspace_backward_runs_the_layer_again(missing: str) -> None:
    args = _arguments()
    exact = _exactly(args)
    if missing == "length":
        found = _differentiated((*args[:-1], args[-1] + 64))
    else:
        found = _differentiated(args, **{missing: _off})
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_differentiated(args), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_fake_kernels_are_those_of_the_operators(bidirectional: bool) -> None:
    args = _arguments(bidirectional)
    torch.library.opcheck(LSTM_LAYER, args, test_utils=("test_schema", "test_faketensor"))
    results = list(LSTM_LAYER(*args))
    wanted = list(range(3 + len(args[2])))[::2]
    given = [None, *map(torch.ones_like, results[1:3])], wanted, results, *args
    backward = torch.ops.tvmbridge.lstm_layer_backward.default
    with FakeTensorMode() as mode:
        fakes = backward(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
    found = [(t.shape, t.stride(), t.dtype) for t in backward(*given)]
    assert found == [(t.shape, t.stride(), t.dtype) for t in fakes]


def test_other_layers_have_no_workspace() -> None:
    x, states, *_ = _arguments()
    doubles = [t.double() for t in (x, *states)]
    projected = [states[0][..., :3], states[1]]
    assert not workspace_length(torch.lstm, doubles[0], doubles[1:], None)
    assert not workspace_length(torch.lstm, x, projected, None)
    assert not workspace_length(torch.lstm, x, states, torch.bfloat16)
    assert not workspace_length(torch.lstm, x[:, :0], [s[:, :0] for s in states], None)
    assert not workspace_length(torch.gru, x, states[:1], None)
