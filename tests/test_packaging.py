"""The built packages have the same modules, whether the checkout has symbolic links or not."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tvmbridge.core import versions
from tvmbridge.core.compiled_half import HALVES

ROOT = Path(__file__).parents[1]
PACKAGED = (".py", "py.typed", ".html", ".css", ".js", ".cpp")
SOURCES = ("setup.py", "pyproject.toml", "LICENSE", "README.md")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the packaged files to a temporary folder, and return the folder."""
    copy = tmp_path_factory.mktemp("packages") / "sources"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy)
    for name in ("tvmbridge", "passes"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    (copy / "tests").mkdir()
    (copy / "tests" / "__init__.py").touch()
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    return build(sources, "wheel")


def build(sources: Path, kind: str) -> Path:
    """Build a ``wheel`` or ``sdist`` with setuptools' own hooks, without network.

    The build cannot import PyTorch, as in pip's isolated builds.
    """
    out = sources.parent / f"{sources.name}-{kind}"
    out.mkdir()
    hidden = "import sys; sys.modules['torch'] = sys.modules['tvm_ffi'] = None"
    script = f"{hidden}; from setuptools.build_meta import build_{kind} as b; b({str(out)!r})"
    subprocess.run(
        [sys.executable, "-c", script], cwd=sources, check=True, timeout=120, capture_output=True
    )
    (built,) = out.iterdir()
    return built


def modules(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith(PACKAGED)}


def expected_modules(sources: Path) -> set[str]:
    folders = {"tvmbridge": "tvmbridge", "passes": "tvmbridge/passes"}
    found = {"tvmbridge/py.typed"}
    for folder, name in folders.items():
        paths = [path for path in (sources / folder).rglob("*") if path.suffix in PACKAGED]
        for path in paths:
            found.add(f"{name}/{path.relative_to(sources / folder).as_posix()}")
    return found


def test_the_passes_are_a_relative_link() -> None:
    link = ROOT / "tvmbridge" / "passes"
    if not link.is_symlink():
        pytest.skip("this checkout has no symbolic links")
    assert os.readlink(link) == "../passes"


def test_the_passes_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.import_module("tvmbridge.passes").__name__ == "tvmbridge.passes"
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=r"import 'tvmbridge\.passes' instead"):
        importlib.import_module("passes")
    assert "passes" not in sys.modules


def test_a_wheel_holds_all_modules_and_nothing_else(sources: Path, wheel: Path) -> None:
    expected = expected_modules(sources)
    assert modules(wheel) == expected
    assert "tvmbridge/passes/relax/__init__.py" in expected


def test_one_wheel_serves_every_python_and_has_the_sources_of_the_halves(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    for half in HALVES.values():
        assert half.source.relative_to(ROOT).as_posix() in modules(wheel)


def test_a_wheel_without_the_link_is_the_same(sources: Path, tmp_path: Path) -> None:
    expected = expected_modules(sources)
    plain = shutil.copytree(sources, tmp_path / "plain", symlinks=True)
    link = plain / "tvmbridge" / "passes"
    if link.is_symlink():
        link.unlink()
        link.write_text("../passes")  # git writes this file if it cannot create symbolic links
    assert modules(build(plain, "wheel")) == expected


def test_a_wheel_from_the_source_distribution_is_the_same(sources: Path, tmp_path: Path) -> None:
    expected = expected_modules(sources)
    with tarfile.open(build(sources, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert modules(build(unpacked, "wheel")) == expected


def test_pytorch_finds_the_backends_by_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/entry_points.txt")]
        _, _, rest = archive.read(name).decode().partition("[torch_dynamo_backends]\n")
    declared = dict(line.split(" = ") for line in rest.partition("\n[")[0].split("\n") if line)
    names = ("tvmbridge", "tvmbridge_eager", "tvmbridge_aot")
    assert declared == {name: f"tvmbridge.dynamo:{name}" for name in names}
    for value in declared.values():
        assert callable(importlib.metadata.EntryPoint("", value, "").load())


def test_the_requirements_carry_the_pins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist") or []
    assert {f"{name}=={version}" for name, version in versions.PINS.items()} <= set(required)
    assert {f"{name}>={version}" for name, version in versions.MINIMUMS.items()} <= set(required)
    extras = {"benchmarks", "demo", "draw", "tune", "notebooks", "test", "torchrec", "dev", "docs"}
    assert extras == set(metadata.get_all("Provides-Extra") or [])
    assert not [line for line in required if "sentence-transformers" in line]
