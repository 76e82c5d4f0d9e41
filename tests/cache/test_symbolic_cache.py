"""Symbolic code from the cache: its key has all that it depends on, and results equal eager's."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cache.test_cached_build import ENTRIES
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.cache import CacheKey, Store
from tvmbridge.compiler.cached_build import CachedBuild


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))


class Small(nn.Module):
    """A product, a layer norm, and a mean over the rows, whose number is symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).tanh()) - x.mean(0)


def _dispatched(module: nn.Module) -> nn.Module:
    return add_tvm_dispatch(module, torch.randn(4, 6), dynamic_shapes="auto")


def _trained(module: nn.Module, rows: int) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 6 * rows).reshape(rows, 6).requires_grad_()
    module.zero_grad()
    result = module(x)
    result.square().sum().backward()
    return [result, x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def test_a_hit_returns_what_eager_pytorch_does() -> None:
    eager = Small()
    modules = [_dispatched(copy.deepcopy(eager)) for _ in range(2)]
    for rows in (9, 23, 70):
        expected = _trained(eager, rows)
        for module in modules:
            torch.testing.assert_close(_trained(module, rows), expected, rtol=1e-4, atol=1e-5)
    reports = [dispatch_report(m) for m in modules]
    assert [r.fallbacks for r in reports] == [{}, {}]
    sources = [{s.cache for s in r.specializations[1:]} for r in reports]
    assert sources == [{"miss: nothing is kept for this graph"}, {"hit"}]
    passes = [[p.name for p in r.specializations[1].passes] for r in reports]
    assert passes[0] == passes[1]


def test_each_entry_alone_makes_a_miss_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[CacheKey] = []
    genuine = CachedBuild.key

    def key(self: CachedBuild, compiled_of: dict[str, str]) -> CacheKey:
        found.append(genuine(self, compiled_of))
        return found[-1]

    monkeypatch.setattr(CachedBuild, "key", key)
    module = _dispatched(Small().eval())
    module(torch.randn(9, 6))
    entries = found[-1].entries
    # No plan of symbolic code is kept for another process, so nothing binds it to a module.
    assert set(entries) == {*ENTRIES, "sizes", "reach"} - {"inputs and results"}
    assert entries["tuning records"] == "not used"
    store = Store.of_now()
    assert not isinstance(store.read(found[-1]), str)
    for name in entries:
        missed = store.read(CacheKey({**entries, name: f"{entries[name]} other"}))
        assert missed == ("nothing is kept for this graph" if name == "graph" else f"other {name}")


def test_code_for_a_wider_range_has_a_key_of_its_own() -> None:
    for rows in (9, 5000):
        module = _dispatched(Small().eval())
        module(torch.randn(rows, 6))
        assert dispatch_report(module).specializations[1].cache.startswith("miss")


_SCRIPT = """
import torch
from tests.cache.test_symbolic_cache import Small, _dispatched, _trained
from tvmbridge import dispatch_report
torch.manual_seed(0)
eager = Small()
module = Small()
module.load_state_dict(eager.state_dict())
_dispatched(module)
for rows in (9, 31):
    torch.testing.assert_close(_trained(module, rows), _trained(eager, rows), rtol=1e-4, atol=1e-5)
report = dispatch_report(module)
assert report.fallbacks == {}, report.fallbacks
print(report.specializations[1].cache)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_process_hits() -> None:
    module = _dispatched(Small())
    _trained(module, 9)
    assert dispatch_report(module).specializations[1].cache.startswith("miss")
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "hit"), done.stderr
