"""Fixtures: compile modules on the CPU as for a GPU, with emulated kernels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.schedules.gpu.emulator import EmulatedFunction, emulate_gpu


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)


@pytest.fixture
def kernels(_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of emulated functions that are called."""
    called: list[Any] = []
    genuine = EmulatedFunction.__call__

    def noted(self: EmulatedFunction, *tensors: Any) -> None:
        called.append(self.lowered)
        genuine(self, *tensors)

    monkeypatch.setattr(EmulatedFunction, "__call__", noted)
    return called
