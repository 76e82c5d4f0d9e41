"""Fallbacks and compilations appear in the log, the report, errors, and on a terminal."""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager, make_block, sample
from tvmbridge import CaptureError, FallbackError, add_tvm_dispatch, dispatch_report
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.runtime import fallbacks, progress
from tvmbridge.runtime.fallbacks import Tally

SHAPE = "the shape of an input differs"
NAMED = "argument `x`: shape (5, 24), compiled for (6, 24)"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "tvmbridge")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_the_first_of_each_reason_names_argument_expected_and_got(warnings: Any) -> None:
    module = add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())
    for rows in (5, 4, 3):
        module(sample(rows, 24))
    module(sample().float().double())
    with pytest.raises(RuntimeError, match="dtype"):
        module(sample(dtype=torch.float32))
    shape, dtype = warnings()
    assert NAMED in shape
    assert "pad inputs" in shape
    assert "argument `x`: dtype torch.float32, compiled for torch.float64" in dtype
    report = dispatch_report(module)
    assert report.fallbacks == {SHAPE: 3, "the dtype of an input differs": 1}
    assert report.examples[SHAPE] == NAMED
    assert report.share == pytest.approx(0.2)
    text = str(report)
    assert "calls served by TVM: 1 of 5 (20%)" in text
    assert NAMED in text
    assert "what to do first: pad inputs" in text


def test_nested_arguments_are_named_by_their_place(warnings: Any) -> None:
    class Nested(nn.Module):
        def forward(self, batch: dict[str, Any], *more: torch.Tensor) -> torch.Tensor:
            return batch["ids"][1] + sum(more)

    module = add_tvm_dispatch(Nested().eval(), ({"ids": [1, sample()]}, sample()))
    module({"ids": [1, sample(1, 24)]}, sample())
    assert "argument `batch['ids'][1]`: shape (1, 24), compiled for (6, 24)" in warnings()[0]


class Box:
    """A pytree node without ``flatten_with_keys_fn``, so that its tensors have no paths."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


torch.utils._pytree.register_pytree_node(Box, lambda b: ([b.held], None), lambda h, _: Box(*h))


def test_a_container_that_torch_export_refuses_is_refused_by_name(warnings: Any) -> None:
    class Opens(nn.Module):
        def forward(self, box: Box) -> torch.Tensor:
            return box.held * 2

    with pytest.raises(CaptureError, match="flatten_with_keys_fn"):
        add_tvm_dispatch(Opens().eval(), Box(sample()))
    module = add_tvm_dispatch(Opens().eval())
    torch.testing.assert_close(module(Box(sample())), sample() * 2)
    assert "flatten_with_keys_fn" in warnings()[0]


def test_silent_only_counts(warnings: Any) -> None:
    module = add_tvm_dispatch(
        make_block().eval().requires_grad_(False), sample(), on_fallback="silent"
    )
    module(sample(5, 24))
    assert warnings() == []
    assert dispatch_report(module).fallbacks == {SHAPE: 1}
    add_tvm_dispatch(module, sample(), on_fallback="warn")
    module(sample(5, 24))
    assert len(warnings()) == 1
    # Without ``on_fallback``, a dispatch keeps the setting of an earlier one.
    add_tvm_dispatch(module, sample(), on_fallback="silent")
    add_tvm_dispatch(module, sample())
    with torch.autocast("cpu"):
        module(sample())
    assert len(warnings()) == 1


def test_raise_names_the_reason_and_runs_no_forward() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = add_tvm_dispatch(Counts().eval(), sample(), on_fallback="raise")
    torch.testing.assert_close(module(sample()), sample() * 2)
    with pytest.raises(FallbackError, match=r"argument `x`: shape \(5, 24\), compiled for .*; pad"):
        module(sample(5, 24))
    assert dispatch_report(module).fallbacks == {SHAPE: 1}


def test_another_word_is_refused() -> None:
    module = make_block()
    with pytest.raises(ValueError, match="on_fallback is 'loud'; choose one of warn, silent"):
        add_tvm_dispatch(module, on_fallback="loud")  # type: ignore[arg-type]
    assert "forward" not in module.__dict__


def test_reasons_are_bounded() -> None:
    tally = Tally("M", "silent")
    for number in range(500):
        tally.note(Reason(Kind.FAILED, f"reason {number}"))
        tally.note(Reason(Kind.SHAPE, f"shape {number}"))
    assert len(tally.counts) == len(tally.reasons) == 65
    assert sum(tally.counts.values()) == 1000
    assert (tally.counts[SHAPE], tally.reasons[SHAPE].example) == (500, "shape 0")


SCRIPT = """
import torch
from torch import nn
import tvmbridge

def run(word, rows):
    module = tvmbridge.add_tvm_dispatch(nn.Linear(3, 3).eval(), torch.randn(2, 3), on_fallback=word)
    for count in rows:
        module(torch.randn(count, 3))
    return module

run("warn", (2, 2, 4, 5))       # it is gone when the process ends
kept = run("warn", (2, 6, 6, 6))
served = run("warn", (2, 2))
silent = run("silent", (7,))
"""


def test_topics_and_a_summary_are_logged_in_a_process(tmp_path: Path) -> None:
    asked = {"TVMBRIDGE_LOGS": "+guards,cache,compile", "TVMBRIDGE_CACHE": "1"}
    environment = {**os.environ, **asked, "TVMBRIDGE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    for told in ("compiled Linear", "def guard(args, kwargs):", "compiled code: miss"):
        assert told in done.stderr
    lines = [line for line in done.stderr.splitlines() if "TVM served" in line]
    assert len(lines) == 2, done.stderr
    assert "Linear: TVM served 2 of 4 calls (50%); 2 ran the module's own forward" in done.stderr
    assert "Linear: TVM served 1 of 4 calls (25%)" in done.stderr
    assert "shape (4, 3), compiled for (2, 3)" in lines[0] + lines[1]
    assert "Exception" not in done.stderr


def test_a_compilation_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tvmbridge.runtime")
    module = add_tvm_dispatch(make_block().eval(), sample())
    module.train()
    module(sample().requires_grad_())
    first, second = [r.getMessage() for r in caplog.records]
    assert first.startswith("compiled Block ((6, 24) float64) for eval: ")
    assert "operators" in first
    assert "capture" in first
    assert "a call asks" not in first
    assert "; code compiled (off: " in first
    assert second.endswith("; a call asks for it: the first in mode train with gradients")
    assert all(r.levelno == logging.INFO for r in caplog.records)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_terminal_shows_the_stage_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setattr(progress, "disk_text", lambda: "3 of 4 from disk")
    with progress.progress("compiling [M]") as tell:
        tell("capture")
        until = time.monotonic() + (30.0 if patience == 0 else 0.3)
        while "capture" not in terminal.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    shown = terminal.getvalue()
    assert ("compiling [M]: capture (code so far: 3 of 4 from disk)" in shown) is (patience == 0)
    time.sleep(0.3)
    assert terminal.getvalue() == shown


def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("compiling") as tell:
        tell("capture")
    assert capsys.readouterr().err == ""


def test_stages_are_told_while_a_module_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress._ProgressLine, "stage", lambda self, name: told.append(name))
    add_tvm_dispatch(make_block().train(), sample())
    assert told == ["capture", "differentiate", "split", "build", "first run"]


def test_a_module_that_is_gone_leaves_its_summary_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    gc.collect()
    monkeypatch.setattr(fallbacks, "_gone", kept)
    module = add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())
    torch.testing.assert_close(module(sample(5, 24)), eager(module)(sample(5, 24)))
    del module
    gc.collect()
    assert [text[:36] for text in kept] == ["Block: TVM served 0 of 1 calls (0%);"]
