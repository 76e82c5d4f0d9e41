"""Repeated dispatching, calling and removing leaves no memory or objects in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MAPS = Path("/proc/self/maps")
# Runs in a separate process, since fixtures and plugins of the test suite hold objects of tests.
_SCRIPT = """
import gc
import torch
from torch import nn
from tvmbridge import add_tvm_dispatch, remove_tvm_dispatch

gc.freeze()  # collections skip the objects of the imported modules

def mappings():
    return sum("code.so" in line for line in open("/proc/self/maps"))

def cycles(count, training):
    for _ in range(count):
        module = nn.Linear(8, 8).train(training)
        x = torch.ones(2, 8)
        add_tvm_dispatch(module, x)
        result = module(x)
        if training:
            result.sum().backward()
        remove_tvm_dispatch(module)
    del module, x, result
    while gc.collect():  # objects with finalizers take several collections
        pass
    return mappings(), len(gc.get_objects())

for training in (True, False):
    before = cycles(3, training)
    after = cycles(3, training)
    print(after[0] - before[0], (after[1] - before[1]) / 3)
"""


@pytest.mark.slow
@pytest.mark.skipif(not _MAPS.exists(), reason="the system does not list mappings")
def test_nothing_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        mappings, objects = line.split()
        assert int(mappings) == 0
        # PyTorch and Python keep a few objects in caches of bounded size.
        assert float(objects) < 5
