"""The cache folder: every environment has one, and reading its name never raises."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from tvmbridge.core.compiled_half import halves_folder
from tvmbridge.core.machine import cache_folder

_NAMES = ("TVMBRIDGE_CACHE_DIR", "TVMBRIDGE_HALVES_DIR", "XDG_CACHE_HOME", "HOME")


def _no_such_user(_: object) -> pwd.struct_passwd:
    raise KeyError


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", _no_such_user)


def test_a_user_without_a_home_has_a_folder_of_its_own() -> None:
    folder = Path(tempfile.gettempdir()) / f"tvmbridge-{os.getuid()}"
    assert cache_folder() == folder
    assert halves_folder() == folder / "halves"


def test_names_below_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-a-test")
    assert cache_folder() == Path("/home/of-a-test/.cache/tvmbridge")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/tvmbridge")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", "~/mine")
    assert cache_folder() == Path("/home/of-a-test/mine")


def test_an_unknown_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TVMBRIDGE_CACHE_DIR", "TVMBRIDGE_HALVES_DIR"):
        monkeypatch.setenv(name, "~no-such-user/x")
    assert cache_folder() == halves_folder() == Path("~no-such-user/x")
