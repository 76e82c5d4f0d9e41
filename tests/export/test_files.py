"""Damaged files, other processors and other versions give errors that say so."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import re
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tvmbridge_runtime

import tvmbridge
from tests.export.damage import edited_files, exported, special_files
from tests.export.models import MLP


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    return exported(folder)


def test_what_is_no_regular_file_is_refused_at_once(intact: Path, tmp_path: Path) -> None:
    # Opening a FIFO waits for a writer.
    for what, path in special_files(tmp_path / "special"):
        missing = what in ("missing", "link to itself", "path below a file", "long name")
        with pytest.raises(OSError if missing else tvmbridge_runtime.FileError):
            tvmbridge_runtime.load(path)
    beside = exported(tmp_path, beside=True)
    weights = tmp_path / f"{beside.name}.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(tvmbridge_runtime.FileError):
        tvmbridge_runtime.load(beside)
    with pytest.raises(FileExistsError, match="no regular file"):
        tvmbridge.export(MLP().eval(), torch.zeros(4, 64), weights)


def test_every_damage_is_noticed(intact: Path, tmp_path: Path) -> None:
    header = bytearray(intact.read_bytes())
    for place in range(64):
        path = tmp_path / "damaged.tvmb"
        path.write_bytes(
            header[:place] + bytes([header[place] ^ 1 << place % 8]) + header[place + 1 :]
        )
        with pytest.raises(tvmbridge_runtime.FileError):
            tvmbridge_runtime.load(path)
    for _, path in edited_files(intact, tmp_path, count=240):
        with pytest.raises(tvmbridge_runtime.FileError):
            tvmbridge_runtime.load(path)


def changed(path: Path, content: bytes, **values: Any) -> Path:
    """Write a file with a changed manifest and right checksums; return its path."""
    length = int.from_bytes(content[8:16], "little")
    manifest = json.loads(content[64 : 64 + length])
    for key, value in values.items():
        manifest[key] = {**manifest.get(key, {}), **value} if isinstance(value, dict) else value
    text = json.dumps(manifest).encode().ljust(length)
    begin = content[:8] + len(text).to_bytes(8, "little")
    begin += zlib.crc32(text).to_bytes(4, "little")
    header = (begin + zlib.crc32(begin).to_bytes(4, "little")).ljust(64, b"\0")
    path.write_bytes(header + text + content[64 + length :])
    return path


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target": {"features": ["avx9000"]}}, "needs avx9000"),
        ({"target": {"architecture": "riscv64"}}, "for riscv64 processors"),
        ({"versions": {"tvm": "0.1"}}, r"compiled by TVM 0\.1"),
    ],
    ids=["features", "architecture", "version"],
)
def test_other_machines_are_refused(
    values: dict[str, Any], words: str, intact: Path, tmp_path: Path
) -> None:
    path = changed(tmp_path / "model.tvmb", intact.read_bytes(), **values)
    with pytest.raises(tvmbridge_runtime.MachineError, match=words):
        tvmbridge_runtime.load(path)


def test_other_formats_are_refused(intact: Path, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.tvmb", intact.read_bytes(), format=2)
    with pytest.raises(tvmbridge_runtime.FileError, match="has format 2"):
        tvmbridge_runtime.load(path)
    path.write_bytes(b"not a function")
    with pytest.raises(tvmbridge_runtime.FileError, match="no function that tvmbridge exported"):
        tvmbridge_runtime.load(path)


@pytest.mark.parametrize(
    "values",
    [
        {"inputs": [{"name": "x"}]},
        {"inputs": None},
        {"target": "x86"},
        {"versions": []},
        {"outputs": None, "structure": None},
        {"parameters": [{"name": "missing", "dtype": "float32", "shape": [2]}]},
        {"parameters": [{"name": "first.bias", "dtype": "float128", "shape": [96]}]},
        {"sections": {"code": {"offset": 0, "size": 1 << 62}}},
        {"sections": {"weights": {"offset": 1 << 62, "size": 8}}},
        {"sections": {"weights": {"offset": -64, "size": 128}}},
        {"sections": {"code": {"offset": 0, "size": 100}}},
        {"sections": {"code": {"offset": 0, "size": 9000}}},
        {"structure": {"kind": "output", "number": 7}},
        {"body": {"chunk": 0}},
        {"body": {"size": -1}},
        {"body": {"size": 10**30}},
        {"body": {"crc32": [1]}},
        {"body": {"crc32": None}},
        {"symbols": 3},
        {"beside": {"file": "elsewhere", "size": 1, "chunk": 1, "crc32": []}},
    ],
    ids=lambda values: json.dumps(values)[:50],
)
def test_a_manifest_that_describes_another_file_is_refused(
    values: dict[str, Any], intact: Path, tmp_path: Path
) -> None:
    path = changed(tmp_path / "model.tvmb", intact.read_bytes(), **values)
    with pytest.raises(tvmbridge_runtime.RuntimeFileError, match=re.escape(str(path))):
        tvmbridge_runtime.load(path)


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, 0])
def test_a_wrong_length_of_the_manifest_is_refused(
    length: int, intact: Path, tmp_path: Path
) -> None:
    content = bytearray(intact.read_bytes())
    content[8:16] = length.to_bytes(8, "little")
    content[20:24] = zlib.crc32(content[:20]).to_bytes(4, "little")
    path = tmp_path / "model.tvmb"
    path.write_bytes(content)
    with pytest.raises(tvmbridge_runtime.FileError):
        tvmbridge_runtime.load(path)


def test_a_link_finds_the_weights_beside_its_file(intact: Path, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    module = MLP().eval()
    path = tmp_path / "v1" / "model.tvmb"
    tvmbridge.export(module, torch.zeros(4, 64), path, weights="beside")
    (tmp_path / "now.tvmb").symlink_to(path)
    found = tvmbridge_runtime.load(tmp_path / "now.tvmb")(numpy.zeros((4, 64), numpy.float32))
    numpy.testing.assert_allclose(found, module(torch.zeros(4, 64)).detach(), atol=1e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
def test_code_for_another_processor(tmp_path: Path) -> None:
    module, x = MLP().eval(), torch.ones(4, 64)
    path = tvmbridge.export(module, x, tmp_path / "model.tvmb", target="x86-64-v2")
    assert "avx2" not in tvmbridge_runtime.read_manifest(path)["target"]["features"]
    assert tvmbridge.compare_export(module, x, path).ok


def test_an_unknown_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tvmbridge.BridgeError, match=r"'x86-64-v9' is no .* such as x86-64"):
        tvmbridge.export(MLP().eval(), torch.ones(4, 64), tmp_path / "m", target="x86-64-v9")


def test_the_intact_file_runs(intact: Path) -> None:
    assert tvmbridge_runtime.load(intact)(numpy.zeros((4, 64), numpy.float32)).shape == (4, 32)


def test_the_checksum_in_the_code_is_the_one_of_zlib(tmp_path: Path) -> None:
    source = Path(tvmbridge.__file__).parent / "exporting" / "_checksums.c"
    library = tmp_path / "checksums.so"
    command = ["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    checksum = ctypes.CDLL(str(library)).tvmbridge_crc32
    checksum.restype, checksum.argtypes = ctypes.c_uint32, (ctypes.c_char_p, ctypes.c_size_t)
    content = random.Random(0).randbytes(3000)
    for size in (*range(200), 255, 256, 1000, 3000):
        assert checksum(content, size) == zlib.crc32(content[:size]), size
