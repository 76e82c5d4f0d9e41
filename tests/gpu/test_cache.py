"""GPU code that one process compiled serves a second process; damaged code is a miss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.helpers import GPU

pytestmark = [*GPU, pytest.mark.timeout(600)]

_SCRIPT = """
import json
import torch
from tests.gpu.helpers import STEPS, assert_same, batch, gradients, pair, replays, with_dropout
from tvmbridge import dispatch_report

tvm, eager = pair(with_dropout, batch())
for number in range(STEPS):
    values = []
    for module in (tvm, eager):
        module.zero_grad()
        torch.manual_seed(number)
        output = module(batch(number))
        output.square().sum().backward()
        values.append({"output": output.detach()} | gradients(module))
    assert_same(*values)
report = dispatch_report(tvm).specializations[0]
found = {"cache": report.cache, "seconds": report.seconds, "replays": replays(tvm)}
found["recalled"] = report.recalled
print(json.dumps(found))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(folder))
    return folder


def _run() -> dict[str, Any]:
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_process_hits_and_replays_graphs(cache: Path) -> None:
    first, second = _run(), _run()
    assert first["cache"] == "miss: nothing is kept for this graph"
    assert second["cache"] == "hit"
    assert second["replays"] == first["replays"] > 0
    assert second["recalled"] == "from disk, without capture"
    assert not second["seconds"]


def test_a_second_process_captures_if_plans_are_turned_off(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMBRIDGE_RECALL", "0")
    first, second = _run(), _run()
    assert second["cache"] == "hit"
    assert second["seconds"]["build"] < first["seconds"]["build"]


def test_damaged_code_is_compiled_again(cache: Path) -> None:
    _run()
    for path in cache.glob("*.tvmbridge"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert "its checksum is another" in _run()["cache"]
    assert _run()["cache"] == "hit"
