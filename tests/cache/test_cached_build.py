"""Code from the cache: its key has all that the code depends on, and its results equal eager's."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import make_block, sample
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.cache import CacheKey, Store, surroundings
from tvmbridge.compiler import cached_build
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.compiler.exported import can_link
from tvmbridge.kernels import keys
from tvmbridge.schedules.target import host_target

ENTRIES = (
    "graph",
    "residuals",
    "inputs and results",
    "options",
    "tuning records",
    "device",
    "target",
    "processor",
    "torch",
    "tvm",
    "tvmbridge",
    "settings",
    "variables",
    "pass context",
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))


def dispatched(module: nn.Module, *args: torch.Tensor, **options: object) -> str:
    """Dispatch ``module``, captured each time; return the cache entry of its report."""
    add_tvm_dispatch(module, args, options={"recall": False, **options})
    return dispatch_report(module).specializations[-1].cache


def _block() -> nn.Module:
    """Return a block whose parameters are frozen, so that calls run the code of the sample."""
    return make_block().eval().requires_grad_(False)


class Everything(nn.Module):
    """A module with most features: two products of one input, dropout, written buffers, aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.25)
        self.register_buffer("table", torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.dropout(self.norm(self.query(x) + torch.log1p(self.key(x).abs())))
        return y, y[:, :3], y[x[:, 0] > 0], self.table


def _results(module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(4, 16).requires_grad_()
    results = module(x)
    if module.training:
        sum(r.square().sum() for r in results).backward()
        results += (x.grad, *(p.grad for p in module.parameters()))
    return [*results, *module.buffers()]


@pytest.mark.parametrize(("training", "linker"), [(True, True), (False, False)], ids=str)
def test_a_hit_returns_what_eager_pytorch_does(
    training: bool, linker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linker:
        for name in ("CXX", "CC"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", "")
        assert not can_link()
    eager = Everything().double().train(training)
    first, second = copy.deepcopy(eager), copy.deepcopy(eager)
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    options = {"combine_matmuls": "always", "measure_kernels": False}
    assert dispatched(first, x, **options).startswith("miss: nothing is kept")
    assert dispatched(second, x, **options) == "hit"
    expected = _results(eager)
    for module in (first, second):
        for result, wanted in zip(_results(module), expected, strict=True):
            # A batch norm of four rows amplifies rounding errors.
            torch.testing.assert_close(result, wanted, rtol=1e-11, atol=1e-12)
        assert dispatch_report(module).fallbacks == {}
    reports = [dispatch_report(m).specializations[0] for m in (first, second)]
    assert [r.name for r in reports[0].passes] == [r.name for r in reports[1].passes]
    assert reports[0].kernels == reports[1].kernels


def test_two_modules_of_one_file_live_apart() -> None:
    first, second, third = (_block() for _ in range(3))
    for module in (first, second, third):
        dispatched(module, sample())
    eager = _block()
    del second
    third.load_state_dict(eager.state_dict())
    torch.testing.assert_close(third(sample()), eager(sample()), rtol=1e-5, atol=1e-6)
    assert first(sample()).shape == eager(sample()).shape


def test_each_entry_alone_makes_a_miss_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[CacheKey] = []
    genuine = CachedBuild.key
    change: dict[str, str] = {}

    def changed(*args: object) -> CacheKey:
        found.append(genuine(*args))  # type: ignore[arg-type]
        return CacheKey({**found[-1].entries, **change})

    monkeypatch.setattr(CachedBuild, "key", changed)
    dispatched(_block(), sample())
    entries = found[-1].entries
    assert set(entries) == set(ENTRIES)
    store = Store.of_now()
    assert not isinstance(store.read(found[-1]), str)
    for entry in ENTRIES:
        missed = store.read(CacheKey({**entries, entry: f"{entries[entry]} other"}))
        assert missed == (
            "nothing is kept for this graph" if entry == "graph" else f"other {entry}"
        )
    change["settings"] = "other"
    assert dispatched(_block(), sample()) == "miss: other settings"


def _entries() -> dict[str, str]:
    return surroundings.surroundings(host_target())


def test_settings_and_variables_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CacheKey(_entries())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert before.differing(_entries()) == ("settings",)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    assert before.differing(_entries()) == ("settings",)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high")
    assert before.differing(_entries()) == ("settings",)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    assert before.differing(_entries()) == ("settings",)
    torch.backends.mkldnn.conv.fp32_precision = "none"
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert before.differing(_entries()) == ("variables",)
    monkeypatch.undo()
    assert before.differing(_entries()) == ()
    assert before.differing(surroundings.surroundings(host_target(64))) == ("target",)


def test_records_are_in_the_key(tmp_path: Path) -> None:
    target = host_target()
    entry = surroundings.records_entry(str(tmp_path), True, target)
    folder = surroundings.Folder.below(tmp_path, target).path
    folder.mkdir()
    (folder / "verdicts.json").write_text("{}\n")
    assert surroundings.records_entry(str(tmp_path), True, target) != entry
    assert surroundings.records_entry(None, True, target) != entry


def test_sources_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "module.py"
    source.write_text("a = 1\n")
    monkeypatch.setattr(surroundings, "_PACKAGE", tmp_path)
    digest, changed = surroundings._sources.__wrapped__()
    source.write_text("a = 2\n")
    assert surroundings._sources.__wrapped__()[0] != digest
    monkeypatch.setattr(surroundings, "_sources", lambda: (digest, changed))
    monkeypatch.setattr(surroundings, "_IMPORTED", changed - 1)
    assert "changed since it was imported" in str(surroundings.unusable(True))


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert dispatched(_block(), sample(), cache=False) == "off: the option cache is off"
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    assert dispatched(_block(), sample()) == "off: TVMBRIDGE_CACHE is 0"
    assert not (tmp_path / "cache").exists()
    assert CompileOptions().cache


def test_a_damaged_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a library whose checksum is right, but which cannot be loaded."""
    dispatched(_block(), sample())
    genuine = cached_build.module_of
    calls: list[bytes] = []

    def fail_first(library: bytes) -> object:
        calls.append(library)
        return genuine(library if len(calls) > 1 else b"no library")

    monkeypatch.setattr(cached_build, "module_of", fail_first)
    module = _block()
    assert dispatched(module, sample()).startswith("miss: it cannot be loaded")
    assert module(sample()).isfinite().all()


def test_code_that_cannot_be_exported_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("no room")

    monkeypatch.setattr(cached_build, "exported", fail)
    module = _block()
    assert dispatched(module, sample()).endswith("it cannot be exported")
    assert module(sample()).isfinite().all()


def test_a_linker_that_fails_leaves_bitcode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check a linker that fails like gcc without the C library's development files."""
    program = tmp_path / "cxx"
    program.write_text("#!/bin/sh\necho cannot find crti.o >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    first, second = _block(), _block()
    assert dispatched(first, sample()) == "miss: nothing is kept for this graph"
    monkeypatch.delenv("CXX")
    assert dispatched(second, sample()) == "hit"
    assert torch.equal(first(sample()), second(sample()))
    assert "cannot be exported" not in caplog.text


def test_a_key_that_stands_for_another_spec_is_refused() -> None:
    key = keys.key_of('{"a": "spec"}')
    assert keys.adopt({key: '{"a": "spec"}', "other!": "one"})
    assert not keys.adopt({key: '{"a": "second"}'})


_SCRIPT = """
import torch
from torch import nn
from tvmbridge import add_tvm_dispatch, dispatch_report
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)).train()
x = torch.randn(4, 8, requires_grad=True)
expected = module(x)
(wanted,) = torch.autograd.grad(expected.square().sum(), x)
add_tvm_dispatch(module, x)
y = module(x)
(found,) = torch.autograd.grad(y.square().sum(), x)
torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
print(dispatch_report(module).specializations[0].cache)
"""


@pytest.mark.timeout(600)
def test_a_second_process_hits(capsys: pytest.CaptureFixture[str]) -> None:
    exec(_SCRIPT, {})
    assert capsys.readouterr().out.strip() == "miss: nothing is kept for this graph"
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "hit"), done.stderr
