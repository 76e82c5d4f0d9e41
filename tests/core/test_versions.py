"""The pinned versions of packages, and their check before tvm is imported."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tvmbridge.core import versions
from tvmbridge.core.errors import BridgeError, VersionError

RIGHT = {**versions.PINS, "torch": "2.13.0+cpu"}


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    metadata: dict[str, str] | None = None,
    source: dict[str, str] | None = None,
    missing: tuple[str, ...] = (),
) -> None:
    """Make the check see these versions in the metadata and in the modules' version files."""
    metadata = RIGHT if metadata is None else metadata
    modules = {"apache-tvm": "tvm", "apache-tvm-ffi": "tvm_ffi", "torch": "torch"}
    for name, module in modules.items():
        (folder / module).mkdir()
        if source is not None and name in source:
            text = f"__version__ = version = {source[name]!r}\n"
            (folder / module / "_version.py").write_text(text)

    def metadata_version(name: str) -> str:
        if name not in metadata:
            raise importlib.metadata.PackageNotFoundError(name)
        return metadata[name]

    def module_folder(module: str) -> Path | None:
        return None if module in missing else folder / module

    monkeypatch.setattr(importlib.metadata, "version", metadata_version)
    monkeypatch.setattr(versions, "_module_folder", module_folder)


def test_the_installed_versions_pass() -> None:
    versions.check_versions()
    assert all(package.problem is None for package in versions.installed_versions())


def test_the_error_is_a_bridge_error_and_an_import_error() -> None:
    assert issubclass(VersionError, BridgeError)
    assert issubclass(VersionError, ImportError)


@pytest.mark.parametrize(
    ("name", "version"),
    [("apache-tvm", "0.26.0"), ("apache-tvm-ffi", "0.1.15"), ("torch", "2.10.1+cu128")],
)
def test_a_wrong_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, version: str
) -> None:
    pretend(monkeypatch, tmp_path, metadata={**RIGHT, name: version})
    with pytest.raises(VersionError) as caught:
        versions.check_versions()
    message = str(caught.value)
    assert f"{name} {version} is installed" in message
    assert "pip install apache-tvm==" in message
    for pin, pinned in versions.PINS.items():
        assert f"{pin}=={pinned}" in message


@pytest.mark.parametrize("version", ["2.11", "2.11.0", "2.13.0+cpu", "2.15.0a0+git12", "3.0"])
def test_new_enough_torch_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    pretend(monkeypatch, tmp_path, metadata={**RIGHT, "torch": version})
    versions.check_versions()


def test_a_local_build_of_the_pin_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = {**RIGHT, "apache-tvm": versions.PINS["apache-tvm"] + "+cu130"}
    pretend(monkeypatch, tmp_path, metadata=built)
    versions.check_versions()


def test_all_problems_are_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = {"apache-tvm": "0.25.0", "apache-tvm-ffi": "0.1.15", "torch": "2.4.0"}
    pretend(monkeypatch, tmp_path, metadata=wrong)
    with pytest.raises(VersionError) as caught:
        versions.check_versions()
    assert all(f"{name} {version}" in str(caught.value) for name, version in wrong.items())


def test_an_absent_module_is_refused_even_with_metadata(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, missing=("tvm",))
    with pytest.raises(VersionError, match="apache-tvm is not installed"):
        versions.check_versions()


def test_an_unpacked_tvm_is_read_from_its_version_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = {name: version for name, version in RIGHT.items() if name != "apache-tvm"}
    pretend(monkeypatch, tmp_path, metadata=metadata, source={"apache-tvm": "0.25.0"})
    with pytest.raises(VersionError, match=r"apache-tvm 0\.25\.0 is installed"):
        versions.check_versions()


def test_a_module_unlike_its_metadata_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, source={"apache-tvm-ffi": "0.1.15"})
    with pytest.raises(VersionError, match=r"apache-tvm-ffi 0\.1\.15 is installed"):
        versions.check_versions()


def test_an_unknown_version_is_logged_and_let_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = {name: version for name, version in RIGHT.items() if name != "apache-tvm"}
    pretend(monkeypatch, tmp_path, metadata=metadata)
    with caplog.at_level(logging.WARNING):
        versions.check_versions()
    assert "the version of apache-tvm cannot be determined" in caplog.text


@pytest.mark.parametrize(
    ("version", "warned"), [("2.15.0+cu132", False), ("2.16.0", True), ("3.0.1", True)]
)
def test_a_torch_newer_than_was_tested_is_taken_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    version: str,
    warned: bool,
) -> None:
    pretend(monkeypatch, tmp_path, metadata={**RIGHT, "torch": version})
    versions.check_versions()
    assert (f"torch {version} is newer than" in caplog.text) is warned


@pytest.mark.parametrize("text", ["__version__ = read()\n", "def broken(\n", "version = '1'\n"])
def test_an_unreadable_version_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "_version.py").write_text(text)
    assert versions._source_version(tmp_path) is None


def test_the_check_imports_nothing_that_it_checks() -> None:
    script = (
        "import importlib.util, sys, types\n"
        "package = types.ModuleType('tvmbridge')\n"
        f"package.__path__ = [{str(Path(versions.__file__).parents[1])!r}]\n"
        "sys.modules['tvmbridge'] = package\n"
        "from tvmbridge.core.versions import check_versions\n"
        "check_versions()\n"
        "assert not {'tvm', 'tvm_ffi', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "-m", "tvmbridge", "doctor"], True),
        (["python", "-P", "/venv/bin/tvmbridge", "doctor"], True),
        (["python", "-m", "tvmbridge", "--version"], True),
        (["python", "-m", "tvmbridge", "demo"], False),
        (["python", "script.py", "doctor"], False),
    ],
)
def test_running_doctor(monkeypatch: pytest.MonkeyPatch, words: list[str], expected: bool) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert versions.running_doctor() is expected
