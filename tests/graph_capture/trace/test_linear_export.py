"""The replacement that makes torch.export linear in time puts parameters in the same places."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export._unlift import _assign_attr, _AttrKind

from tvmbridge.graph_capture.capture import capture
from tvmbridge.graph_capture.trace.linear_export import _assigned, sources_put_off


def _holder() -> nn.Module:
    """Return a module with submodules ``a`` and ``b``; ``b`` has one that is called twice."""
    module = nn.Module()
    for name in ("a", "b"):
        module.add_module(name, nn.Module())
    for name in ("c", "c@1"):
        module.b.add_module(name, nn.Module())
    return module


def test_values_get_where_pytorch_puts_them() -> None:
    for path in ("w", "a.w", "new.one.w", "b.c.w", "a.c.w"):
        value = nn.Parameter(torch.ones(2))
        ours, theirs = _holder(), _holder()
        _assigned(_assign_attr, value, ours, path, attr_kind=_AttrKind.PARAMETER)
        _assign_attr(value, theirs, path, attr_kind=_AttrKind.PARAMETER)
        found = [dict(m.named_parameters(remove_duplicate=False)) for m in (ours, theirs)]
        assert found[0].keys() == found[1].keys()
        assert all(each is value for each in found[0].values())
        assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graph modules whose source is generated within the test."""
    names: list[str] = []
    genuine = fx.GraphModule.recompile

    def noted(module: fx.GraphModule) -> Any:
        names.append(type(module).__name__)
        return genuine(module)

    monkeypatch.setattr(fx.GraphModule, "recompile", noted)
    return names


def test_a_source_is_generated_at_the_first_call_or_question(written: list[str]) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), 1)))
    with sources_put_off():
        called, asked = fx.GraphModule({}, graph), fx.GraphModule({}, graph)
        asked.recompile()
        assert not written
        copied = copy.deepcopy(asked)
    assert called(torch.ones(1)) == called(torch.ones(1)) == 2
    assert "torch.add" in asked.code
    assert asked(torch.ones(1)) == copied(torch.ones(1)) == 2
    assert len(written) == 3
    asked.recompile()
    assert asked(torch.ones(1)) == 2


def test_captures_write_little_source(written: list[str]) -> None:
    capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).train(), torch.ones(1, 2), needs_grad=True)
    assert len(written) <= 5
