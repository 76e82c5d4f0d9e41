"""All names of PyTorch that tvmbridge uses are in every release that it supports."""

from __future__ import annotations

import ast

import pytest

from tests.core import torch_names
from tvmbridge.core.torch_private.table import checks
from tvmbridge.core.versions import MINIMUMS, NEWEST

COMMAND = "run `python -m tests.core.torch_names` with each of these releases"
RELEASES, RECORD = torch_names.read(torch_names.FILE.read_text(encoding="utf-8"))


def test_the_oldest_and_the_newest_release_were_examined() -> None:
    assert {MINIMUMS["torch"], NEWEST["torch"]} <= RELEASES, COMMAND


def test_each_name_is_in_every_release() -> None:
    used = torch_names.names_used()
    assert torch_names.lacking(used, RELEASES, RECORD) == [], COMMAND
    assert RECORD.keys() - used == set(), COMMAND


def test_the_record_is_right_for_the_installed_release() -> None:
    if torch_names.RELEASE not in RELEASES:
        pytest.skip(f"PyTorch {torch_names.RELEASE} was not examined")
    recorded = {name for name, having in RECORD.items() if torch_names.RELEASE in having}
    assert {name for name in recorded if not torch_names.is_here(name)} == set()


def test_a_name_that_a_release_lacks_or_nobody_examined_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, older = "torch._functorch.predispatch._make_dual", "torch._VF._make_dual"
    assert "2.11" not in RECORD[name]
    assert torch_names.lacking([name, older], RELEASES, RECORD) == []
    monkeypatch.setattr(checks, "ALTERNATIVES", [])
    found = torch_names.lacking([name, older, "torch.newer"], frozenset({"2.11", "2.13"}), RECORD)
    assert found == [
        f"{name}: not known to be in PyTorch 2.11",
        "torch.newer: not known to be in PyTorch 2.11, 2.13",
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn\ntorch.nn.Linear(1, 1)", {"torch", "torch.nn.Linear"}),
        ("from torch import nn as n\nn.Linear.forward", {"torch.nn", "torch.nn.Linear.forward"}),
        ("from .torch import nn\nnn.Linear", set()),
        ("from ours import short\nshort.mul", {"torch.ops.aten", "torch.ops.aten.mul"}),
        ("import torch\na = torch.ops\nprint(a.b)", {"torch", "torch.ops", "torch.ops.b"}),
    ],
)
def test_names_are_found_in_full(source: str, found: set[str]) -> None:
    shared = {"ours": {"short": "torch.ops.aten"}}
    assert set(torch_names.names_in(ast.parse(source), shared)) == found


def test_what_is_written_is_read_again() -> None:
    record = {"torch.a": frozenset({"2.11"}), "torch.b": frozenset({"2.11", "2.13"})}
    record["torch.c"] = frozenset()
    text = torch_names.written({"2.11", "2.13"}, record)
    assert text == "releases: 2.11 2.13\ntorch.a 2.11\ntorch.b\ntorch.c none\n"
    assert torch_names.read(text) == ({"2.11", "2.13"}, record)
