"""Compiled C++ halves: compiled once, kept on disk, and refused if others could change the file."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvmbridge.core import compiled_half as halves
from tvmbridge.core import half_build
from tvmbridge.core.compiled_half import Half, HalfState
from tvmbridge.core.half_build import HalfError, compile_half

NAME = "tvmbridge.core._tiny"
SOURCE = """
#include <Python.h>
#include <torch/version.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tiny", "", -1, nullptr};
PyMODINIT_FUNC PyInit__tiny(void) {
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION);
    return module;
}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Half:
    """Replace all halves by a small one, in its own folder, and forget what is loaded."""
    source = tmp_path / "_tiny.cpp"
    source.write_text(SOURCE)
    half = Half(NAME, source, "a test fails")
    monkeypatch.setattr(halves, "HALVES", {NAME: half})
    monkeypatch.setattr(halves, "_loaded", {})
    monkeypatch.setattr(halves, "_reasons", {})
    monkeypatch.setattr(halves, "_builds", None)
    monkeypatch.setattr(halves, "_forked", False)
    monkeypatch.setenv(halves.FOLDER, str(tmp_path / "halves"))
    monkeypatch.setenv(halves.SWITCH, "build")
    return half


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset this process's state as if it were a new process."""
    halves._loaded.clear()
    halves._reasons.clear()
    monkeypatch.setattr(halves, "_builds", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def compiler(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a compiler that logs its calls and runs ``script``; return the log file's path."""
    notes, program = tmp_path / "calls", tmp_path / "cxx"
    program.write_text(f"#!/bin/sh\necho call >> {notes}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return notes


def genuine() -> str:
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    return f'exec {found} "$@"'


def state() -> HalfState:
    (found,) = halves.states()
    return found


def test_the_suite_runs_with_every_half() -> None:
    """Check that all halves are compiled in this test run, unless there is no compiler."""
    try:
        half_build.compiler_command()
    except HalfError as error:
        pytest.skip(str(error))
    if halves.word() == "off":
        pytest.skip(f"{halves.SWITCH} is off")
    assert [str(s) for s in halves.states() if s.path is None] == []


def test_a_half_is_compiled_once_and_said(
    tiny: Half,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = compiler(tmp_path, genuine(), monkeypatch)
    assert "first use compiles it" in state().reason
    module = halves.compiled_half(NAME)
    assert module.TORCH_VERSION
    assert halves.compiled_half(NAME) is module
    assert state().path == Path(module.__file__)
    assert caplog.text.count("this happens once") == 1
    another_process(monkeypatch)
    monkeypatch.setenv("CXX", "/no/such/compiler")  # the file on disk needs no compiler
    assert halves.compiled_half(NAME).TORCH_VERSION
    assert notes.read_text() == "call\n"
    assert stat.S_IMODE((tmp_path / "halves").stat().st_mode) == 0o700


def test_processes_that_begin_at_once_compile_once(
    tiny: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = compiler(tmp_path, "sleep 0.2; " + genuine(), monkeypatch)
    path = halves.half_path(tiny)
    path.parent.mkdir()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: compile_half(tiny.source, path), range(4))) == {path}
    assert notes.read_text() == "call\n"
    assert [p.suffix for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_a_failure_is_told_and_not_repeated_unasked(
    tiny: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = compiler(tmp_path, "echo 'x.cpp:1: error: no such header' >&2; exit 1", monkeypatch)
    for _ in range(2):
        assert halves.compiled_half(NAME) is None
        assert "error: no such header" in state().reason
        assert "a test fails" in str(state())
        another_process(monkeypatch)
    assert "error: no such header" in state().reason
    assert notes.read_text() == "call\n"
    (again,) = halves.build_halves()
    assert again.path is None
    assert notes.read_text() == "call\ncall\n"
    compiler(tmp_path, genuine(), monkeypatch)  # a changed compiler is tried automatically
    another_process(monkeypatch)
    assert halves.compiled_half(NAME) is not None


def test_a_compiler_that_hangs_is_ended(
    tiny: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(half_build, "SECONDS", 0.3)
    assert halves.compiled_half(NAME) is None
    assert "did not end within" in state().reason


def test_without_a_compiler_it_says_what_to_do(tiny: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert halves.compiled_half(NAME) is None
    assert "there is no C++ compiler; install g++" in state().reason
    assert halves.missing_halves() == [state()]


@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_others_may_have_written_is_not_loaded(
    tiny: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    compiler(tmp_path, genuine(), monkeypatch)
    path = Path(halves.compiled_half(NAME).__file__)
    another_process(monkeypatch)
    (path if which == "file" else path.parent).chmod(0o777)
    assert "can be written by others" in state().reason
    assert halves.compiled_half(NAME) is None
    assert "can be written by others" in state().reason


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"TVMBRIDGE_HALVES": "load"}, "TVMBRIDGE_HALVES is load"),
        ({"TVMBRIDGE_HALVES": "off"}, "TVMBRIDGE_HALVES is off"),
        ({"TVMBRIDGE_HALVES_DIR": "", "TVMBRIDGE_CACHE": "0"}, "TVMBRIDGE_CACHE is off"),
    ],
)
def test_settings_turn_it_off(
    tiny: Half,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, str],
    why: str,
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert halves.compiled_half(NAME) is None
    assert why in state().reason
    assert not (tmp_path / "cache").exists()


def test_a_forked_process_compiles_nothing(tiny: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_lock", halves._lock)
    halves._after_fork()
    assert halves.compiled_half(NAME) is None
    assert "forked" in state().reason


def test_a_half_of_another_pytorch_is_not_used(
    tiny: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, genuine(), monkeypatch)
    assert halves.build_halves()[0].path is not None
    monkeypatch.setattr(halves, "torch", SimpleNamespace(__version__="2.0.0+cpu"))
    another_process(monkeypatch)
    assert halves.compiled_half(NAME) is None
    assert "was compiled for PyTorch" in state().reason


def test_a_damaged_file_is_not_used(tiny: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    path = halves.half_path(tiny)
    path.parent.mkdir(mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    assert halves.compiled_half(NAME) is None
    assert "cannot be loaded" in state().reason
    kept: Any = halves.build_halves()  # replaces it
    assert kept[0].path == path
