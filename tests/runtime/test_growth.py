"""Dispatching, calling and removing again and again leaves nothing behind in the process."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, remove_tvm_dispatch

_MAPS = Path("/proc/self/maps")
_CYCLES = 4


def _mappings() -> int:
    """The mappings of libraries that compiled code was loaded from."""
    return sum("code.so" in line for line in _MAPS.read_text(encoding="utf-8").splitlines())


def _cycle(training: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).train(training)
    x = torch.ones(2, 8)
    add_tvm_dispatch(module, x)
    result = module(x)
    if training:
        result.sum().backward()
    remove_tvm_dispatch(module)


@pytest.mark.skipif(not _MAPS.exists(), reason="the system does not list mappings")
@pytest.mark.parametrize("cached", ["0", "1"])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_grows(
    training: bool, cached: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", cached)
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path))
    for _ in range(4):
        _cycle(training)
    gc.collect()
    mappings, objects = _mappings(), len(gc.get_objects())
    for _ in range(_CYCLES):
        _cycle(training)
    gc.collect()
    assert _mappings() == mappings
    # PyTorch and Python enter a few objects into caches of a bounded size.
    assert len(gc.get_objects()) - objects < 5 * _CYCLES
