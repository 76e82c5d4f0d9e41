"""The events of compiled calls and of compilation in torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tvmbridge import add_tvm_dispatch
from tvmbridge.core.profiling import region
from tvmbridge.kernels.titles import kernels_told, title


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x))) + x


def profiled() -> Any:
    return profile(activities=[ProfilerActivity.CPU])


def within(events: list[Any], outer: str) -> set[str]:
    """Return the names of the events inside the event ``outer``."""
    (region_,) = [e for e in events if e["name"] == outer]
    end = region_["ts"] + region_["dur"]
    inside = [e for e in events if region_["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end]
    return {e["name"] for e in inside} - {outer}


def events_of(recorded: Any, tmp_path: Path) -> list[Any]:
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]


@pytest.fixture(scope="module")
def feed() -> nn.Module:
    torch.manual_seed(0)
    return add_tvm_dispatch(Feed().train(), torch.randn(4, 8), options={"cache": False})


def test_a_call_is_a_region_with_its_kernels(feed: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    feed(x)
    with profiled() as recorded:
        feed(x).sum().backward()
    events = events_of(recorded, tmp_path)
    forward = within(events, "tvmbridge::Feed forward")
    backward = within(events, "tvmbridge::Feed backward")
    assert any("gelu" in name for name in forward)
    assert "tvmbridge.matmul" in forward
    assert "tvmbridge.matmul" in backward
    assert any(name.startswith("fused_") for name in backward)
    assert not any(name.startswith("vm.") for name in forward | backward)


def test_compilation_is_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    with profiled() as recorded:
        add_tvm_dispatch(Feed().eval(), torch.randn(4, 8))
    stages = within(events_of(recorded, tmp_path), "tvmbridge::compile Feed")
    for stage in ("capture", "import", "passes", "build", "read the cache"):
        assert f"tvmbridge::compile: {stage}" in stages


def test_results_are_the_same_while_it_records(feed: nn.Module) -> None:
    x = torch.randn(4, 8)
    expected = feed(x)
    with profiled():
        found = feed(x)
    assert torch.equal(found, expected)
    assert torch.equal(feed(x), expected)


def test_nothing_is_told_where_it_is_off(feed: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    feed(x)

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    monkeypatch.setattr("tvmbridge.compiler.executable.kernels_told", refuse)
    feed(x).sum().backward()


def test_a_kernel_that_raises_leaves_no_region_open() -> None:
    class Machine:
        told: Any = None

        def set_instrument(self, told: Any) -> None:
            self.told = told

    machine = Machine()

    def run() -> None:
        with kernels_told(machine):
            machine.told(None, "fused_add", True, None)
            raise ValueError("stop")

    with profiled() as recorded:
        with region("outer"), pytest.raises(ValueError, match="stop"):
            run()
        with region("after"):
            pass
    assert machine.told is None
    names = {event.key for event in recorded.key_averages()}
    assert {"tvmbridge::outer", "fused_add", "tvmbridge::after"} <= names


def test_titles() -> None:
    assert title("vm.builtin.reshape", ()) is None
    assert title("fused_multiply12_tir_sum4_gelu", ()) == "fused_multiply_sum_gelu"
    assert title("tir_sum2", ()) == "sum"
    assert title("conv2d", ()) == "conv2d"
    assert title("tvmbridge.aten", ('{"op": "aten.log1p.default"}',)) == "aten.log1p.default"
    assert title("tvmbridge.matmul", ('{"views": []}',)) == "tvmbridge.matmul"
