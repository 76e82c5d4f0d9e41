"""A TVM that has Relay parses, builds and runs the texts; results are those of eager PyTorch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
