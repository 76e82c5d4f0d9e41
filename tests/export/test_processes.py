"""Exported functions in processes without PyTorch: Python, C++, and the command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmbridge
from tests.export.models import MLP
from tests.export.test_files import changed
from tvmbridge.cli import main

ROOT = Path(__file__).parents[2]

_ALONE = """
import sys
import numpy
import tvmbridge_runtime

function = tvmbridge_runtime.load(sys.argv[1], threads=2)
x = numpy.ones((16, 64), numpy.float32)
print(repr(float(function(x)[0, 0])))
maps = open("/proc/self/maps").read()
print(sorted(n for n in ("torch", "tvm") if n in sys.modules), "libtorch" in maps,
      "libtvm_compiler" in maps)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    torch.manual_seed(0)
    module = MLP().eval()
    path = tmp_path_factory.mktemp("export") / "model.tvmb"
    tvmbridge.export(module, torch.ones(16, 64), path)
    return path, float(module(torch.ones(16, 64)).detach()[0, 0])


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_python_without_pytorch(model: tuple[Path, float]) -> None:
    path, expected = model
    done = run(sys.executable, "-c", _ALONE, str(path), PYTHONPATH=str(ROOT / "runtime"))
    assert done.returncode == 0, done.stderr
    value, loaded = done.stdout.splitlines()
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert loaded == "[] False False"


@pytest.mark.skipif(sys.platform != "linux", reason="uses ldd")
def test_cpp_without_python(model: tuple[Path, float], tmp_path: Path) -> None:
    path, expected = model
    runtime, program = ROOT / "runtime", tmp_path / "run"
    options = run(
        sys.executable, "-m", "tvmbridge_runtime", "--cxx", PYTHONPATH=str(runtime)
    ).stdout
    source = runtime / "examples" / "run.cpp"
    assert len(source.read_text().splitlines()) <= 80
    built = run("g++", "-std=c++17", str(source), "-o", str(program), *shlex.split(options))
    assert built.returncode == 0, built.stderr
    linked = run("ldd", str(program)).stdout
    assert "not found" not in linked
    libraries = [line.split()[0] for line in linked.splitlines()]
    assert "libtvm_runtime.so" in libraries
    assert not [name for name in libraries if re.search("python|torch|tvm_compiler", name)]
    done = run(str(program), str(path))
    assert done.returncode == 0, done.stderr
    first = re.fullmatch(r"result 0: 16 32, first (\S+)\n", done.stdout)
    assert first is not None, done.stdout
    assert float(first[1]) == pytest.approx(expected, rel=1e-5)
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[-3] ^= 1
    (tmp_path / "damaged.tvmb").write_bytes(damaged)
    holds: list[Any] = ["and", ["ge", ["add", 2, 3], 5], ["eq", ["mod", -7, 3], 2]]
    # As an argument and as its symbol.
    rows = {"name": "x", "dtype": "float32", "shape": ["x", 64], "least": 2, "most": 9, "offset": 0}
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    wrong: list[tuple[Path, str]] = [(tmp_path / "damaged.tvmb", "is damaged")]
    for number, (values, words) in enumerate(
        [
            ({"versions": {"tvm": "0.1"}}, "compiled by TVM 0.1"),
            ({"relations": [holds, ["lt", ["floordiv", -7, 2], -4]]}, "do not fulfil"),
            ({"sections": {"weights": {"offset": 0, "size": 1 << 60}}}, "beyond its end"),
            ({"sections": {"code": {"offset": 0, "size": 9000}}}, "no whole library"),
            ({"parameters": [{"name": "none", "dtype": "float32"}]}, "does not describe its"),
            ({"inputs": [{"name": "x"}]}, "does not describe its"),
            ({"outputs": None}, "does not describe its"),
            ({"parameters": [{"name": "first.bias", "dtype": "float32x4"}]}, "has dtype float32x4"),
            ({"inputs": [{"name": "x", "dtype": "int4", "shape": []}]}, "has dtype int4"),
            ({"relations": [["eq", 1]]}, "lacks operands"),
            ({"outputs": []}, "returns 1 results, not 0"),
            ({"inputs": [rows], "symbols": [rows | {"scale": 4}]}, "is 2 and must be a multiple"),
            ({"inputs": [rows], "symbols": [rows | {"scale": 0}]}, "has the scale 0"),
            ({"constants": nested}, "nested too deeply"),
        ]
    ):
        wrong.append((changed(tmp_path / f"{number}.tvmb", content, **values), words))
    for file, words in wrong:
        done = run(str(program), str(file))
        assert done.returncode == 1, (words, done)
        assert words in done.stderr
    link = tmp_path / "linked.tvmb"
    link.symlink_to(changed(tmp_path / "holds.tvmb", content, relations=[holds]))
    assert run(str(program), str(link)).stdout == first[0]


def factory() -> tuple[Any, Any]:
    return MLP().eval(), torch.ones(16, 64)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.tvmb"
    assert main(["export", "tests.export.test_processes:factory", "--out", str(path)]) == 0
    assert main(["export", "--inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "argument x float32[16, 64]" in printed
    assert "result 0 float32[16, 32]" in printed
    path.write_bytes(b"damaged")
    assert main(["export", "--inspect", str(path)]) == 1
    with pytest.raises(SystemExit):
        main(["export"])
