"""Cache files: a changed file is a miss, with a warning."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmbridge.cache import CacheKey, Kept, Store
from tvmbridge.cache import store as store_module

KEY = CacheKey({"graph": "g", "torch": "1", "tvm": "2"})
KEPT = Kept({"numbers": [1, 2]}, random.Random(0).randbytes(3000))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "cache")
    assert made.write(KEY, KEPT) is None
    return made


def test_what_is_kept_is_found(store: Store) -> None:
    assert store.read(KEY) == KEPT
    assert store.path(KEY).stat().st_mode & 0o022 == 0
    assert store.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["torch", "tvm"])
def test_a_miss_names_the_entry_that_differs(store: Store, name: str) -> None:
    assert store.read(CacheKey({**KEY.entries, name: "other"})) == f"other {name}"


def test_another_graph_is_nothing_like_it(store: Store) -> None:
    other = store.read(CacheKey({**KEY.entries, "graph": "other"}))
    assert other == "nothing is kept for this graph"


def test_damaged_files_are_misses(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Check 200 files: truncated, with a flipped bit, or with inserted bytes."""
    path, draw = store.path(KEY), random.Random(1)
    whole = path.read_bytes()
    for number in range(200):
        content = bytearray(whole)
        place = draw.randrange(len(whole))
        if number % 3 == 0:
            content = content[:place]
        elif number % 3 == 1:
            content[place] ^= 1 << draw.randrange(8)
        else:
            content[place:place] = draw.randbytes(draw.randrange(1, 20))
        path.write_bytes(content)
        caplog.clear()
        assert isinstance(store.read(KEY), str)
        assert "is not used" in caplog.text
        list(store.keys())
    assert store.write(KEY, KEPT) is None
    assert store.read(KEY) == KEPT


def test_a_file_under_another_name_is_a_miss(store: Store) -> None:
    other = CacheKey({**KEY.entries, "torch": "3"})
    store.path(other).write_bytes(store.path(KEY).read_bytes())
    assert "another key" in str(store.read(other))


def _by_others(store: Store) -> None:
    store.path(KEY).chmod(0o666)


def _in_a_shared_folder(store: Store) -> None:
    store.folder.chmod(0o777)


def _of_another_user(store: Store) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(store.path(KEY), 12345, 12345)


@pytest.mark.parametrize("spoil", [_by_others, _in_a_shared_folder, _of_another_user])
def test_files_that_others_can_write_are_refused(
    store: Store, caplog: pytest.LogCaptureFixture, spoil: Callable[[Store], None]
) -> None:
    spoil(store)
    assert isinstance(store.read(KEY), str)
    assert "written by others" in caplog.text or "another user" in caplog.text


def test_nothing_is_written_into_a_shared_folder(store: Store) -> None:
    store.folder.chmod(0o777)
    assert "written by others" in str(store.write(CacheKey({"graph": "h"}), KEPT))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), PermissionError(13, "read-only")])
def test_a_full_or_read_only_disk_keeps_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(store_module, "replace_file", refuse)
    assert "cannot be kept" in str(store.write(CacheKey({"graph": "h"}), KEPT))
    assert store.read(KEY) == KEPT


def test_a_folder_that_is_a_file_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    assert "cannot be kept" in str(store.write(KEY, KEPT))
    assert isinstance(store.read(KEY), str)


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = [CacheKey({"graph": str(i)}) for i in range(4)]
    for number, key in enumerate(keys[:3]):
        store.write(key, KEPT)
        os.utime(store.path(key), (number, number))
    assert store.read(keys[0]) == KEPT  # reading makes it the most recently used
    store.most = 3 * store.size() // 3 + 10
    store.write(keys[3], KEPT)
    assert [store.path(k).exists() for k in keys] == [True, False, True, True]
    assert store.size() <= store.most
    assert store.clear() == 3


def _write_and_read(folder: Path, number: int) -> bool:
    store, right = Store(folder, 40_000), True
    for i in range(60):
        key = CacheKey({"graph": str((number + i) % 13)})
        store.write(key, Kept({}, key.digest.encode() * 50))
        found = store.read(key)
        right &= isinstance(found, str) or found.library == key.digest.encode() * 50
    return right


def test_eight_processes_share_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(8) as pool:
        assert all(pool.starmap(_write_and_read, [(tmp_path, i) for i in range(8)]))
    assert not list(tmp_path.glob(".*"))
