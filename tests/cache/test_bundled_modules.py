"""A bundle with the code of one module: another cache imports it, and results equal eager's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import assert_same_step, eager, make_block, sample, train_step
from tvmbridge import BundleError, add_tvm_dispatch, dispatch_report, load_compiled, save_compiled
from tvmbridge.cli import main
from tvmbridge.recall import RECALLED


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    _use_cache(tmp_path, "first", monkeypatch)


def _use_cache(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / name))


def test_another_cache_has_forward_and_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path = make_block().train(), tmp_path / "bundle"
    second, expected = copy.deepcopy(first), copy.deepcopy(first)
    add_tvm_dispatch(first, sample().requires_grad_())
    train_step(first, sample())
    first.eval()
    with torch.no_grad():
        first(sample())
    report = save_compiled(first, path)
    assert report.counts["code"] == 2
    assert not report.left_out
    _use_cache(tmp_path, "second", monkeypatch)
    assert load_compiled(second, path).counts["code"] == 2
    add_tvm_dispatch(second, sample().requires_grad_())
    assert_same_step(second, expected, sample())
    second.eval()
    with torch.no_grad():
        torch.testing.assert_close(second(sample()), eager(second)(sample()))
    specializations = dispatch_report(second).specializations
    assert [s.cache for s in specializations] == ["hit", "hit"]
    assert [s.recalled for s in specializations] == [RECALLED, RECALLED]


def test_a_changed_module_takes_no_plan_of_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path = nn.Sequential(nn.Linear(3, 4), nn.ELU(1.0)).eval(), tmp_path / "bundle"
    second = nn.Sequential(nn.Linear(3, 4), nn.ELU(0.5)).eval()
    with torch.no_grad():
        add_tvm_dispatch(first, torch.ones(2, 3))
        assert save_compiled(first, path).counts["plans"] == 1
        _use_cache(tmp_path, "second", monkeypatch)
        assert load_compiled(second, path).counts["plans"] == 1
        x, expected = -torch.ones(2, 3), copy.deepcopy(second)
        add_tvm_dispatch(second, x)
        torch.testing.assert_close(second(x), expected(x))
    assert dispatch_report(second).specializations[0].recalled.startswith("captured: ")


def test_a_bundle_of_another_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = nn.Linear(3, 4).eval(), tmp_path / "bundle"
    add_tvm_dispatch(module, torch.ones(2, 3))
    save_compiled(module, path)
    _use_cache(tmp_path, "second", monkeypatch)
    with pytest.raises(BundleError, match=r"torch\.nn\.modules\.linear\.Linear, and this is"):
        load_compiled(nn.Tanh(), path)
    with pytest.raises(BundleError, match="other parameters and buffers"):
        load_compiled(nn.Linear(3, 5), path)
    assert not list((tmp_path / "second").glob("*.tvmbridge"))


def test_a_module_without_code_on_disk_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(3, 4).eval()
    with pytest.raises(ValueError, match="is not dispatched"):
        save_compiled(module, tmp_path / "bundle")
    add_tvm_dispatch(module, torch.ones(2, 3), options={"cache": False})
    with pytest.raises(BundleError, match="the option cache is off"):
        save_compiled(module, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(3, 4).eval(), torch.ones(2, 3)


def test_the_command_exports_one_model_and_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bundle"
    model = "tests.cache.test_bundled_modules:linear"
    assert main(["cache", "--export", str(path), "--model", model]) == 0
    _use_cache(tmp_path, "second", monkeypatch)
    assert main(["cache", "--import", str(path)]) == 0
    assert "1 of code" in capsys.readouterr().out
    module, x = linear()
    add_tvm_dispatch(module, x)
    assert dispatch_report(module).specializations[0].cache == "hit"
    with pytest.raises(SystemExit):
        main(["cache", "--size", "--model", model])
