"""A TVM that has Relay parses, builds and runs the texts; results are those of eager PyTorch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmbridge
from tests.relay.models import MODELS
from tests.relay.running import VARIABLE, Relay, difference, interpreter, page_examples, tensors_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        interpreter() is None,
        reason=f"{VARIABLE} names no interpreter with Relay (python -m tests.relay.install)",
    ),
]


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    process = Relay()
    yield process
    process.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_models(relay: Relay, name: str) -> None:
    torch.manual_seed(0)
    module, sample = MODELS[name]()
    written = tvmbridge.to_relay(module, sample)
    with torch.no_grad():
        expected = module(*sample) if isinstance(sample, tuple) else module(sample)
    results = relay.run(written, tensors_in(sample))
    assert difference(results, tensors_in(expected)) is None


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def _written(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> Any:
    y, z = x.clone(), x.clone()
    y[:, index] = values
    z[index, :, index] = values[0, :, :1]
    z.index_put_((index,), torch.ones(2, 4, 3), accumulate=True)
    return y, z, (x > 0).index_put((index - 3,), torch.tensor(True)), x.index_add(0, index, x[:2])


_SIDES = torch.tensor([0.0, -0.0, 1.0, -2.0, 3e30])
_FORMS: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {
    "gru": (torch.nn.GRU(8, 12, 2, bidirectional=True), (torch.randn(5, 2, 8),)),
    "lstm": (torch.nn.LSTM(8, 12, 2, batch_first=True, proj_size=4), (torch.randn(2, 5, 8),)),
    "rnn": (torch.nn.RNN(8, 12, bias=False, nonlinearity="relu"), (torch.randn(5, 8),)),
    "bilinear": (torch.nn.Bilinear(3, 4, 5), (torch.randn(2, 3), torch.randn(2, 4))),
    "spectrum": (Function(lambda x: torch.fft.rfft(x).abs()), (torch.randn(3, 20),)),
    "writes": (
        Function(_written),
        (torch.randn(3, 4, 3), torch.tensor([0, 2]), torch.randn(3, 2, 3)),
    ),
    "signs": (Function(lambda x, y: (x.hypot(y), x.copysign(y))), (_SIDES, _SIDES.flip(0))),
    "or": (Function(lambda x: (x > 0) + (x < -1)), (torch.randn(9),)),
}


@pytest.mark.parametrize("name", _FORMS)
def test_forms(relay: Relay, name: str) -> None:
    module, sample = _FORMS[name]
    written = tvmbridge.to_relay(module.eval(), sample)
    with torch.no_grad():
        expected = tensors_in(module(*sample))
    assert difference(relay.run(written, sample), expected) is None


def test_a_wrong_result_is_noticed(relay: Relay) -> None:
    module = torch.nn.Linear(4, 2).eval()
    x = torch.randn(3, 4)
    written = tvmbridge.to_relay(module, x)
    written.params["bias"][1] += 1e-3
    assert difference(relay.run(written, [x]), [module(x)]) is not None


def test_a_wrong_text_is_an_error(relay: Relay) -> None:
    written = tvmbridge.to_relay(torch.nn.Linear(4, 2).eval(), torch.randn(3, 4))
    broken = written._replace(text=written.text.replace("units=2", "units=3"))
    with pytest.raises(RuntimeError):
        relay.check(broken)


def test_the_page_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writing, running = page_examples()
    exec(compile(writing, "relay.md", "exec"), {})
    command = [str(interpreter()), "-c", running]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    shown = subprocess.check_output(command, text=True, env=environment)
    assert "(1, 1568)" in shown
