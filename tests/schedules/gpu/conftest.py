"""Modules on the CPU, compiled as for a GPU."""

from __future__ import annotations

import pytest

from tests.schedules.gpu.emulator import emulate_gpu


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
