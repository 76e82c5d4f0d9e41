"""Recurrent layers: results, gradients and generator equal eager's, traced and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import covering
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.graph_capture.trace.function_table import FunctionTable


class _Chain(nn.Module):
    """Recurrent layers of several kinds, with some weights frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.gru = nn.GRU(4, 3, 2, dropout=0.4, batch_first=True)
        self.rnn = nn.RNN(3, 3, batch_first=True)
        for parameter in (self.lstm.bias_hh_l0, self.gru.weight_hh_l1, self.rnn.weight_ih_l0):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.gru(self.lstm(x)[0], h)[0])[1]


@pytest.mark.slow
def test_long_sequences_train_like_eager_without_a_kernel_a_step() -> None:
    module, args = _Chain(), (torch.randn(2, 200, 5), torch.randn(2, 2, 3, requires_grad=True))
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, args)
    results = []
    for trained in (module, other):
        torch.manual_seed(1)
        state = trained(*args)
        trainable = [p for p in trained.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(state.square().sum(), [args[1], *trainable])
        results.append((state, *gradients, torch.random.get_rng_state()))
    torch.testing.assert_close(*results)
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    names = {name for name in report.aten_calls if name.startswith("tvmbridge.")}
    assert names == {
        f"tvmbridge.{name}{backward}.default"
        for name in ("lstm_layer", "gru_stack", "rnn_tanh_stack")
        for backward in ("", "_backward")
    }
    assert sum(report.specializations[0].native_operators.values()) < 200


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


_KINDS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "rectified": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
_VARIANTS: list[dict[str, Any]] = [
    {"bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.4},
    {"proj_size": 3},
]
_BOUNDS: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0, "atol": 0},
    torch.float16: {"rtol": 0, "atol": 0},
}


def _results(module: Any, x: torch.Tensor, used: int | None) -> tuple[Any, ...]:
    """Return outputs, gradients of the output ``used`` (None: of all), and generator state."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    output, state = module(x)
    outputs = [output, *(state if isinstance(state, tuple) else [state])]
    drawn = torch.random.get_rng_state()
    differentiated = outputs if used is None else [outputs[used]]
    loss = sum((torch.cos(o) * (i + 1)).sum() for i, o in enumerate(differentiated))
    gradients = torch.autograd.grad(loss, [x, *module.parameters()], allow_unused=True)
    return [o.detach() for o in outputs], gradients, drawn


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on one thread; for small layers, oneDNN's threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "dtype"), covering([*_KINDS], [*_BOUNDS]))
def test_layers_are_those_of_eager_pytorch(kind: str, dtype: torch.dtype) -> None:
    for options in _VARIANTS:
        if "proj_size" in options and kind != "LSTM":
            continue
        torch.manual_seed(0)
        module = _KINDS[kind](5, 4, **options).to(dtype)
        for steps, batch in ((1, 2), (4, 3), (2, 0)):
            shape = (batch, steps, 5) if options.get("batch_first") else (steps, batch, 5)
            x = torch.randn(shape, dtype=dtype)
            for used in (None, 0, 1, 2)[: 4 if kind == "LSTM" else 3]:
                expected = _results(module, x, used)
                with FunctionTable():
                    found = _results(module, x, used)
                torch.testing.assert_close(found[0], expected[0])
                for ours, eager in zip(found[1], expected[1], strict=True):
                    assert (ours is None) is (eager is None)
                    if eager is not None:
                        torch.testing.assert_close(ours, eager, **_BOUNDS[dtype])
                assert torch.equal(found[2], expected[2])
