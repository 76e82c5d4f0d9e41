"""Bundle files: a damaged or hostile file gives an error or a miss, and no code of it is loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from tvmbridge import BundleError
from tvmbridge.cache import CacheKey, Kept, Store, bundle, exchange
from tvmbridge.cache import store as store_module
from tvmbridge.cache.bundle import Part, read_bundle, write_bundle
from tvmbridge.cache.exchange import export_bundle, import_bundle
from tvmbridge.cache.surroundings import machine
from tvmbridge.cli import main
from tvmbridge.core.compiled_half import HALVES, half_path
from tvmbridge.kernels import table

_MAGIC = b"tvmbridge bundle 1\n"
_CHOICES = f"choices-{'0' * 24}.json"


def _key(name: str, **changed: str) -> CacheKey:
    return CacheKey({"graph": name, "device": "cpu", **machine(), **changed})


KEYS = [_key("first"), _key("second")]


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a bundle with two pieces of code and a table of choices."""
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "first"))
    monkeypatch.setenv("TVMBRIDGE_HALVES_DIR", str(tmp_path / "first" / "halves"))
    monkeypatch.delenv("TVMBRIDGE_TUNING_LOGS", raising=False)
    store = Store.of_now()
    for number, key in enumerate(KEYS):
        assert store.write(key, Kept({"number": number}, bytes([number]) * 50)) is None
    choices = {"version": 1, "choices": {"a question": "mkl"}}
    (store.folder / _CHOICES).write_text(json.dumps(choices))
    path = tmp_path / "bundle"
    report = export_bundle(path)
    assert report.counts == {"code": 2, "choices": 1}
    assert not report.left_out
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "second"))
    return path


def test_a_bundle_makes_one_cache_of_two(filled: Path) -> None:
    report = import_bundle(filled)
    assert report.counts == {"code": 2, "choices": 1}
    store = Store.of_now()
    for number, key in enumerate(KEYS):
        assert store.read(key) == Kept({"number": number}, bytes([number]) * 50)
    assert store.folder.stat().st_mode & 0o077 == 0
    assert filled.stat().st_mode & 0o022 == 0


def test_choices_that_are_known_here_stay(filled: Path) -> None:
    folder = Store.of_now().folder
    folder.mkdir(mode=0o700)
    known = {"version": 1, "choices": {"a question": "onednn", "another": "mkl"}}
    (folder / _CHOICES).write_text(json.dumps(known))
    import_bundle(filled)
    assert json.loads((folder / _CHOICES).read_text()) == known


@pytest.mark.parametrize("name", ["processor", "torch", "tvm", "tvmbridge", "device"])
def test_what_does_not_fit_is_left_out_with_the_reason(
    tmp_path: Path, name: str, filled: Path
) -> None:
    other = _key("third", **{name: "another one"})
    store = Store(tmp_path / "elsewhere")
    assert store.write(other, Kept({}, b"")) is None
    content = store.path(other).read_bytes()
    write_bundle(filled, [Part("code", other.digest, content)])
    (reason,) = import_bundle(filled).left_out
    assert "GPU" in reason if name == "device" else f"another {name}" in reason
    assert not Store.of_now().files()


def _sealed(body: bytes) -> bytes:
    return _MAGIC + body + hashlib.sha256(_MAGIC + body).hexdigest().encode()


def _forged(draw: random.Random, whole: bytes) -> bytes:
    """Return a bundle with a right checksum and a changed header."""
    parts = []
    place, body = 0, whole[len(_MAGIC) : -64]
    while length := int.from_bytes(body[place : place + 8], "big"):
        header = json.loads(body[place + 8 : place + 8 + length])
        start = place + 8 + length
        parts.append((header, body[start : start + header["size"]]))
        place = start + header["size"]
    number = draw.randrange(len(parts))
    header, content = parts[number]
    values: list[Any] = ["../../x", "/tmp/x", "", "..", "a\0b", "c" * 64, -1, 2**40, True, None]
    field = draw.choice([*header, "more"])
    header[field] = draw.choice([*values, [], {}, 1.5, draw.choice(parts)[0]["name"]])
    if draw.random() < 0.5:
        content = draw.choice([c for _, c in parts]) + draw.randbytes(draw.randrange(3))
        header |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    parts[number] = (header, content)
    found = b""
    for each, data in parts:
        text = json.dumps(each).encode()
        found += len(text).to_bytes(8, "big") + text + data
    return _sealed(found + bytes(8))


def _cut(draw: random.Random, whole: bytes) -> bytes:
    return whole[: draw.randrange(len(whole))]


def _flipped(draw: random.Random, whole: bytes) -> bytes:
    content = bytearray(whole)
    content[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    return bytes(content)


def _longer(draw: random.Random, whole: bytes) -> bytes:
    place = draw.randrange(len(whole) + 1)
    return whole[:place] + draw.randbytes(draw.randrange(1, 20)) + whole[place:]


def _resealed(draw: random.Random, whole: bytes) -> bytes:
    return _sealed(_flipped(draw, whole[len(_MAGIC) : -64]))


def test_300_damaged_bundles(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each is refused, or that all files taken from it are undamaged; none is loaded."""

    def never(*_: object, **__: object) -> object:
        raise AssertionError("code of a bundle was loaded")

    monkeypatch.setattr(tvm_ffi, "load_module", never)
    whole, draw, store = filled.read_bytes(), random.Random(7), Store.of_now()
    kinds = (_cut, _flipped, _longer, _resealed, _forged)
    refused = 0
    for number in range(300):
        filled.write_bytes(kinds[number % len(kinds)](draw, whole))
        try:
            report = import_bundle(filled)
        except (BundleError, OSError):
            refused += 1
        else:
            assert report.left_out or report.counts
        for index, key in enumerate(KEYS):
            found = store.read(key)
            assert isinstance(found, str) or found == Kept({"number": index}, bytes([index]) * 50)
        assert {path.name for path, _ in store.files()} <= {store.path(k).name for k in KEYS}
        store.clear()
    assert refused > 200
    assert sorted(p.name for p in filled.parent.iterdir()) == ["bundle", "first", "second"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        (2**63).to_bytes(8, "big"),
        (4).to_bytes(8, "big") + b"null" + bytes(8),
        (4).to_bytes(8, "big") + b"\xff\xfe\xff\xfe" + bytes(8),
        (4000).to_bytes(8, "big") + b"[" * 4000 + bytes(8),
        bytes(8) + b"behind the end",
    ],
    ids=["nothing", "long header", "null", "not UTF-8", "deep", "behind the end"],
)
def test_a_hostile_body_with_a_right_checksum(filled: Path, body: bytes) -> None:
    filled.write_bytes(_sealed(body))
    with pytest.raises(BundleError, match="is damaged"):
        import_bundle(filled)


def _written_by_others(path: Path) -> None:
    path.chmod(0o666)


def _of_another_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root may give files away")
    os.chown(path, 12345, 12345)


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _a_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _a_link_to_a_file_of_others(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    other.chmod(0o666)
    path.symlink_to(other)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="files have no owners or modes here")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change",
    [_written_by_others, _of_another_user, _a_pipe, _a_circle, _a_link_to_a_file_of_others],
)
def test_files_that_others_may_have_written(
    filled: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    change(filled)
    with pytest.raises(OSError, match=r"can be written|another user|no regular|symbolic links"):
        import_bundle(filled)
    assert main(["cache", "--import", str(filled)]) == 1
    assert "error: " in capsys.readouterr().err
    assert not Store.of_now().files()


def test_eight_writers_and_eight_readers(filled: Path) -> None:
    import_bundle(filled)
    with ThreadPoolExecutor(16) as threads:
        writers = [threads.submit(export_bundle, filled) for _ in range(8)]
        readers = [threads.submit(import_bundle, filled) for _ in range(8)]
        for each in (*writers, *readers):
            assert each.result().counts == {"code": 2, "choices": 1}
    assert {p.kind for p in read_bundle(filled)} == {"code", "choices"}


def test_a_full_disk(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, genuine = filled.read_bytes(), bundle._write

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def filling(file: Any, parts: Any) -> Any:
        genuine(file, [next(iter(parts))])
        return full()

    with monkeypatch.context() as patch:
        patch.setattr(bundle, "_write", filling)
        patch.setenv("TVMBRIDGE_CACHE_DIR", str(filled.parent / "first"))
        assert main(["cache", "--export", str(filled)]) == 1
    assert filled.read_bytes() == whole
    assert not list(filled.parent.glob(".*"))
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "replace_file", full)
        patch.setattr(table, "replace_file", full)
        report = import_bundle(filled)
    assert not report.counts
    assert sum(report.left_out.values()) == 3
    assert any("No space left" in reason for reason in report.left_out)


def test_compiled_halves_travel(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = half_path(next(iter(HALVES.values()))).name
    (tmp_path / "first" / "halves").mkdir(mode=0o700)
    (tmp_path / "first" / "halves" / name).write_bytes(b"a library")
    assert export_bundle(filled).counts["halves"] == 1
    monkeypatch.setenv("TVMBRIDGE_HALVES_DIR", str(tmp_path / "second" / "halves"))
    assert import_bundle(filled).counts == {"halves": 1}
    assert (tmp_path / "second" / "halves" / name).read_bytes() == b"a library"
    other = f"_native-{'0' * 24}.so"
    write_bundle(filled, [Part("halves", other, b"another")])
    (reason,) = import_bundle(filled).left_out
    assert "another version" in reason
    assert [p.name for p in (tmp_path / "second" / "halves").iterdir()] == [name]


def test_the_switch_turns_imports_off(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    with pytest.raises(BundleError, match="TVMBRIDGE_CACHE"):
        import_bundle(filled)


def test_tuning_records_go_where_there_are_none(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {"meta.json": b"{}", "verdicts.json": b"{}\n"}
    names = set(records) & set(exchange._RECORD_FILES)
    parts = [Part("records", f"llvm-2cores:{name}", records[name]) for name in sorted(names)]
    write_bundle(filled, [*parts, Part("records", "llvm-2cores:other.json", b"{}")])
    (reason, *_) = import_bundle(filled).left_out
    assert "TVMBRIDGE_TUNING_LOGS" in reason
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setenv("TVMBRIDGE_TUNING_LOGS", str(logs))
    assert import_bundle(filled).counts == {"records": len(names)}
    assert {p.name for p in (logs / "llvm-2cores").iterdir()} == names
    (logs / "llvm-2cores" / "verdicts.json").write_bytes(b"others")
    report = import_bundle(filled)
    assert any("there are others" in reason for reason in report.left_out)
    assert (logs / "llvm-2cores" / "verdicts.json").read_bytes() == b"others"
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "first"))
    assert export_bundle(filled).counts["records"] == len(names)
