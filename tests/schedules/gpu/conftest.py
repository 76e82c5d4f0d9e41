"""Fixtures: compile modules on the CPU as for a GPU, with emulated kernels."""

from __future__ import annotations

import pytest

from tests.schedules.gpu.emulator import emulate_gpu


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
