"""The command line: its arguments, its exit statuses, and the values that it passes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import types
from pathlib import Path

import graphviz
import pytest
import torch
from tvm import relax

import tvmbridge
from tvmbridge import cli
from tvmbridge.core.errors import BridgeError, CaptureError
from tvmbridge.doctor import command as doctor
from tvmbridge.frontend.registry import CONVERTERS
from tvmbridge.inspect import stages

MODULE = "a_module_of_the_cli_test"
IDENTITY = torch.nn.Identity()


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(MODULE)
    module.pair = lambda: (IDENTITY, "a sample")  # type: ignore[attr-defined]
    module.linear = lambda: (torch.nn.Linear(4, 4).eval(), torch.ones(2, 4))  # type: ignore[attr-defined]
    module.trained = lambda: (torch.nn.Linear(4, 4).train(), torch.ones(2, 4))  # type: ignore[attr-defined]
    module.swapped = lambda: ("a sample", IDENTITY)  # type: ignore[attr-defined]
    module.wrong_shape = lambda: (torch.nn.Linear(4, 4), torch.randn(2, 5))  # type: ignore[attr-defined]
    module.single = lambda: "a module"  # type: ignore[attr-defined]
    module.constant = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.mark.parametrize(
    "words",
    [[], ["paint"], ["doctor", "--fast"], ["visualize"], ["visualize", "m:f", "--stage", "x"]],
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: tvmbridge" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["demo", "--help"], ["visualize", "--help"]]
)
def test_help_and_version_load_nothing(words: list[str]) -> None:
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['tvmbridge', *{words!r}]\n"
        "try:\n"
        "    runpy.run_module('tvmbridge', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not {'tvm', 'torch', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "usage: tvmbridge" in done.stdout or tvmbridge.__version__ in done.stdout


def test_the_version_names_what_it_is_bound_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"tvmbridge {tvmbridge.__version__} (")
    assert f"torch {torch.__version__}" in printed


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("command", ["visualize", "explain", "compare"])
def test_a_wrong_shape_is_told_without_a_traceback(
    command: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main([command, f"{MODULE}:wrong_shape"]) == 1
    captured = capfd.readouterr()
    told = " ".join((captured.out + captured.err).split())
    assert "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)" in told
    assert "Traceback" not in told
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("status", [0, 1])
def test_doctor_gives_its_status(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(doctor, "main", lambda: status)
    assert cli.main(["doctor"]) == status


def test_demo_gets_all_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    demo = types.ModuleType("tvmbridge.demo")
    demo.main = seen.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tvmbridge.demo", demo)
    assert cli.main(["demo", "--steps", "3", "--help"]) == 0
    assert seen == [["--steps", "3", "--help"]]


def test_an_error_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise CaptureError("no such thing")

    monkeypatch.setattr(doctor, "main", refuse)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: no such thing\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_colon", "package.module:factory"),
        (":factory", "package.module:factory"),
        ("no_such_module:factory", "no module 'no_such_module'"),
        ("tvmbridge.no_such_module:factory", "no module 'tvmbridge.no_such_module'"),
        (f"{MODULE}:absent", "no function 'absent'"),
        (f"{MODULE}:constant", "no function 'constant'"),
        (f"{MODULE}:single", "must return a pair"),
        (f"{MODULE}:swapped", "must return a module first, which str is not"),
    ],
)
@pytest.mark.usefixtures("factories")
def test_a_factory_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(cli.UsageError, match=message):
        cli.resolve_factory(name)


def test_what_a_users_module_lacks_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "imports_what_is_absent.py").write_text("import some_absent_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="some_absent_library"):
        cli.resolve_factory("imports_what_is_absent:factory")


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_visualize_has_dot_draw_the_captured_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sources = []

    def pipe(graph: graphviz.Digraph, format: str) -> bytes:
        sources.append(graph.source)
        return f"drawn as {format}".encode()

    monkeypatch.setattr(graphviz.Digraph, "pipe", pipe)
    out = tmp_path / "new folder" / f"graph.{kind}"
    assert cli.main(["visualize", f"{MODULE}:linear", "--out", str(out)]) == 0
    assert out.read_bytes() == f"drawn as {kind}".encode()
    assert "matmul" in sources[0]


@pytest.mark.usefixtures("factories")
def test_visualize_writes_the_source_without_dot(tmp_path: Path) -> None:
    out = tmp_path / "graph.dot"
    assert cli.main(["visualize", f"{MODULE}:linear", "--out", str(out)]) == 0
    small = out.read_text()
    assert cli.main(["visualize", f"{MODULE}:linear", "--all-nodes", "--out", str(out)]) == 0
    assert out.read_text().count("[label=") > small.count("[label=")


@pytest.mark.usefixtures("factories")
def test_visualize_draws_every_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.dot"
    assert cli.main(["visualize", f"{MODULE}:trained", "--stage", "all", "--out", str(out)]) == 0
    written = {path.stem.removeprefix("graph_") for path in tmp_path.iterdir()}
    assert written == set(cli.STAGES)
    assert capsys.readouterr().out.count("wrote ") == len(cli.STAGES)
    joint = (tmp_path / "graph_joint.dot").read_text()
    assert "gradient of weight" in joint
    assert ">forward<" in joint
    assert ">backward<" in joint


@pytest.mark.usefixtures("factories")
def test_without_gradients_there_is_no_joint_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["visualize", f"{MODULE}:linear", "--out", str(tmp_path / "graph.dot"), "--stage"]
    assert cli.main([*words, "joint"]) == 1
    assert "in train mode" in capsys.readouterr().err
    assert cli.main([*words, "all"]) == 0
    stems = sorted(path.stem for path in tmp_path.iterdir())
    assert stems == ["graph_captured", "graph_forward", "graph_passes"]


@pytest.mark.usefixtures("factories")
def test_visualize_without_dot_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pipe(graph: graphviz.Digraph, format: str) -> bytes:
        raise graphviz.ExecutableNotFound(["dot"])

    monkeypatch.setattr(graphviz.Digraph, "pipe", pipe)
    out = tmp_path / "graph.svg"
    assert cli.main(["visualize", f"{MODULE}:linear", "--out", str(out)]) == 1
    assert "dot is not on the PATH" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("factories")
def test_visualize_refuses_an_unknown_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["visualize", f"{MODULE}:linear", "--out", "graph.jpeg"])
    assert "svg, pdf, png, html, dot" in capsys.readouterr().err


def test_the_stages_of_the_help_are_those_there_are() -> None:
    assert tuple(stages.STAGES) == cli.STAGES


def test_usage_errors_are_not_bridge_errors() -> None:
    assert not issubclass(cli.UsageError, BridgeError)


COMPARED = "tests.inspect.compare.models:block_and_input"


def test_compare_says_0_where_there_is_no_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder" / "report.json"
    words = ["compare", COMPARED, "--no-backward", "--stages", "captured,imported"]
    assert cli.main([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "departure from eager PyTorch" in printed
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["stages"] == ["eager", "captured", "imported"]
    assert data["values"] == ["output"]


def test_compare_says_1_where_there_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = torch.ops.aten.tanh.default
    wrong = dataclasses.replace(
        CONVERTERS[operator], function=lambda ctx, node, x: relax.op.sigmoid(ctx.value(x))
    )
    monkeypatch.setitem(CONVERTERS, operator, wrong)
    assert cli.main(["compare", COMPARED, "--no-backward", "--stages", "imported"]) == 1
    printed = capsys.readouterr().out
    assert "aten.tanh.default" in printed
    assert "relax.sigmoid" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "captured,relay"], "no stage is called relay; choose among eager"),
        (["--out", "report.txt"], "--out must end in .json"),
    ],
)
def test_compare_refuses_bad_arguments_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", COMPARED, *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_cache_lists_sizes_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tvmbridge.cache import CacheKey, Kept, Store

    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path))
    Store(tmp_path).write(CacheKey({"graph": "abc", "target": "llvm"}), Kept({}, b"code"))
    (tmp_path / "other.tvmbridge").write_bytes(b"damaged")
    assert cli.main(["cache", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "llvm abc" in listed
    assert "other.tvmbridge 7 damaged" in listed
    assert cli.main(["cache", "--size"]) == 0
    assert f"in {tmp_path}" in capsys.readouterr().out
    assert cli.main(["cache", "--clear"]) == 0
    assert "removed 2 files" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
