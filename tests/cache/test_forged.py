"""Wrong cache files with a right checksum: each is a miss, and none raises."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.cache import CacheKey, Kept, Store
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.schedules.target import host_target

_MAGIC = b"tvmbridge compiled code 1\n"
_X = torch.linspace(-1, 1, 12).reshape(2, 6)


def _module(bias: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Softplus(beta=bias), nn.Linear(6, 6)).eval()
    return module.requires_grad_(False)


def _parts(path: Path) -> tuple[bytes, bytes]:
    """Return the description and the library of a cache file."""
    rest = path.read_bytes()[len(_MAGIC) + 64 :]
    end = 8 + int.from_bytes(rest[:8], "big")
    return rest[8:end], rest[end:]


def _put(path: Path, text: bytes, library: bytes) -> None:
    rest = len(text).to_bytes(8, "big") + text + library
    path.write_bytes(_MAGIC + hashlib.sha256(rest).hexdigest().encode() + rest)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two cache files with code for the same shapes."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVMBRIDGE_CACHE", "1")
        patch.setenv("TVMBRIDGE_CACHE_DIR", str(folder))
        for bias in (0.5, 2.0):
            add_tvm_dispatch(_module(bias), _X)
    return sorted(folder.glob("*.tvmbridge"), key=lambda p: p.stat().st_mtime_ns)


def _json(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(text: bytes) -> bytes:
        content = json.loads(text)
        change(content)
        return json.dumps(content).encode()

    return changed


def _set(*path: str | int, to: Any) -> Callable[[bytes], bytes]:
    """Return a change of the description: the value at ``path`` becomes ``to``."""

    def change(content: Any) -> None:
        for step in path[:-1]:
            content = next(iter(content.values())) if step == "*" else content[step]
        content[path[-1]] = to

    return _json(lambda content: change(content["description"]))


_DESCRIPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "deep": lambda text: b"[" * 100_000,
    "deep within": _set("unaligned", to=json.loads("[" * 100 + "]" * 100)),
    "wide": lambda text: b"[" + b"[]," * 2**21 + b"0]",
    "list": lambda text: b"[]",
    "null": lambda text: b"null",
    "nothing": lambda text: b"",
    "not UTF-8": lambda text: b"\xff\xfe" + text,
    "long number": lambda text: b"9" * 5000,
    "no key": _json(lambda content: content.pop("key")),
    "key is a list": _json(lambda content: content.update(key=[1])),
    "key of lists": _json(lambda content: content.update(key={"graph": [1]})),
    "no description": _json(lambda content: content.pop("description")),
    "description is a list": _json(lambda content: content.update(description=[])),
    "empty description": _json(lambda content: content.update(description={})),
    "flags are numbers": _set("unaligned", "forward", to=[1, 0, 1]),
    "flags are NaN": _set("unaligned", "forward", to=[float("nan")]),
    "flags are a text": _set("unaligned", "forward", to="yes"),
    "functions are a list": _set("unaligned", to=["forward"]),
    "negative result": _set("shared", "forward", to=[-1]),
    "results are texts": _set("shared", "forward", to=["0"]),
    "results are an object": _set("shared", "forward", to={}),
    "coverage of texts": _set("coverage", to={"tuned": "many"}),
    "coverage with more": _set("coverage", "more", to=1),
    "coverage is NaN": _set("coverage", "tuned", to=float("nan")),
    "seconds are infinite": _set("passes", 0, "seconds", to=float("inf")),
    "declined is a text": _set("passes", 0, "declined", to="abc"),
    "pass of nothing": _set("passes", 0, to={}),
    "missing of texts": _set("missing", to=["x"]),
    "missing of no workload": _set("missing", to=[["AAAA", 1]]),
    "another key": _set("keys", "abcdefg", to='{"a": "spec of more than seven bytes"}'),
    "reuse of texts": _set("reuse", to={"forward": {"shared": "1", "separate": 1}}),
    "reuse of more": _set("reuse", to={"forward": [1, 2]}),
}

_LIBRARIES: dict[str, Callable[[bytes], bytes]] = {
    "other machine": lambda code: code[:18] + b"\xb7\x00" + code[20:],
    "32 bits": lambda code: code[:4] + b"\x01" + code[5:],
    "half": lambda code: code[: len(code) // 2],
    "all but the end": lambda code: code[:-1],
    "empty": lambda code: b"",
    "text": lambda code: b"#!/bin/sh\n",
    "another library": lambda code: Path(torch._C.__file__).read_bytes(),
}


def _read(path: Path, text: bytes, library: bytes) -> Built | str:
    """Read a cache file with this content; return the loaded code, or the reason of a miss."""
    key = CacheKey(json.loads(_parts(path)[0])["key"])
    original = path.read_bytes()
    _put(path, text, library)
    try:
        store = Store(path.parent)
        list(store.keys())
        found = store.read(key)
    finally:
        path.write_bytes(original)
    if isinstance(found, str):
        return found
    build = CachedBuild(host_target(), CompileOptions(), torch.device("cpu"))
    return build._loaded(found, [])


def test_what_is_not_forged_is_loaded(genuine: list[Path]) -> None:
    assert isinstance(_read(genuine[0], *_parts(genuine[0])), Built)


@pytest.mark.parametrize("kind", _DESCRIPTIONS)
def test_a_forged_description_is_a_miss(genuine: list[Path], kind: str) -> None:
    text, library = _parts(genuine[0])
    assert isinstance(_read(genuine[0], _DESCRIPTIONS[kind](text), library), str)


@pytest.mark.parametrize("kind", _LIBRARIES)
def test_another_library_is_a_miss(genuine: list[Path], kind: str) -> None:
    text, library = _parts(genuine[0])
    assert isinstance(_read(genuine[0], text, _LIBRARIES[kind](library)), str)


def test_a_library_of_another_graph_is_a_miss(genuine: list[Path]) -> None:
    (first, _), (_, second) = _parts(genuine[0]), _parts(genuine[1])
    assert isinstance(_read(genuine[0], first, second), str)


@pytest.mark.parametrize(
    "change",
    [_DESCRIPTIONS["deep"], _DESCRIPTIONS["list"], _DESCRIPTIONS["empty description"]],
)
def test_a_module_is_compiled_instead(
    genuine: list[Path], monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(genuine[0].parent))
    text, library = _parts(genuine[0])
    _put(genuine[0], change(text), library)
    module, expected = _module(), _module()(_X)
    add_tvm_dispatch(module, _X)
    assert dispatch_report(module).specializations[-1].cache.startswith("miss")
    torch.testing.assert_close(module(_X), expected)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
@pytest.mark.timeout(60)
def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    assert store.write(CacheKey({"graph": "g"}), Kept({}, b"")) is None
    os.mkfifo(store.folder / "0.tvmbridge")
    assert "nothing is kept" in str(store.read(CacheKey({"graph": "other"})))
