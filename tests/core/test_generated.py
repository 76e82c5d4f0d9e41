"""Generated Python source: one place alone runs it, and names and constants cannot inject code."""

from __future__ import annotations

import ast
import copy
import enum
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

import tvmbridge
from tvmbridge.core.generated import Scope, is_literal, plain_text
from tvmbridge.dynamo.graphs import read_graph
from tvmbridge.fx.rewriting import sizes_check
from tvmbridge.graph_capture.relations import Relations

PACKAGE = Path(tvmbridge.__file__).parent
# Builtins and types that turn text or code objects into functions.
MAKERS = {"exec", "eval", "compile", "CodeType", "FunctionType", "run_path", "run_module"}
EXECUTED: list[str] = []


class Hostile(str):
    """A string whose ``repr`` and ``str`` return a Python expression with a side effect."""

    def __repr__(self) -> str:
        return f"(__import__({__name__!r}, fromlist=['x']).EXECUTED.append('repr') or 'k')"

    __str__ = __repr__


class Member(str, enum.Enum):
    """A string whose ``repr`` is no Python expression."""

    KEY = "k"


class Wild(int):
    """An integer whose ``repr`` is no Python expression."""

    def __repr__(self) -> str:
        return "<wild>"


NAMES: list[Callable[[str], str]] = [Hostile, np.str_, lambda text: Member(text)]
PLAIN = ["a'b", 'q"u', "n\nl", "{0}", "a\\", "' or EXECUTED.append(1) or '", "é中", "\ud800", "a\0"]


def _kind(value: object) -> str:
    return type(value).__name__


@pytest.fixture(autouse=True)
def _nothing_executed() -> Iterator[None]:
    EXECUTED.clear()
    yield
    assert not EXECUTED, "a name was executed"


def _calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in MAKERS:
                yield called.id
            elif isinstance(called, ast.Attribute) and called.attr in MAKERS - {"eval", "compile"}:
                yield called.attr


def test_one_place_alone_runs_generated_source() -> None:
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            made = sorted(_calls(path))
            if made:
                found[path.relative_to(PACKAGE).as_posix()] = made
    # These files build functions from existing code objects, not from source.
    trace = "graph_capture/trace"
    for name in (
        "calls/patches",
        f"{trace}/attention",
        f"{trace}/number_functions",
        "dynamo/registry",
    ):
        assert found.pop(f"{name}.py") == ["FunctionType"]
    assert found == {"core/generated.py": ["compile", "exec"]}


@pytest.mark.parametrize(
    "value", [*PLAIN, b"a'\n", 0, -(1 << 70), 1 << 60000, True, None], ids=_kind
)
def test_a_literal_means_its_value(value: Any) -> None:
    scope = Scope()
    found = scope.function("f", f"f = lambda: {scope.literal(value)}", "<test>")()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value", [Hostile("k"), Member.KEY, np.str_("k"), Wild(3), 1.5, (1,)], ids=_kind
)
def test_other_values_are_bound(value: Any) -> None:
    assert not is_literal(value)
    scope = Scope()
    assert scope.function("f", f"f = lambda: {scope.literal(value)}", "<test>")() is value


@pytest.mark.parametrize("name", [make("k") for make in NAMES], ids=_kind)
def test_plain_text_is_exactly_a_string(name: str) -> None:
    assert type(plain_text(name)) is str
    assert plain_text(name).encode() == b"k"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, k: Any = None) -> torch.Tensor:
        return self.layer(x) + k


class Unnamed(Named):
    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        scale = 2.0 if any(type(name) is not str for name in more) else 1.0
        return self.layer(x) + scale * sum(more.values())


def _call_alike(module: nn.Module, calls: list[Mapping[str, Any]]) -> tvmbridge.DispatchReport:
    eager, x = copy.deepcopy(module), torch.randn(3, 4)
    tvmbridge.add_tvm_dispatch(module, on_fallback="silent")
    for keywords in calls:
        for _ in range(3):
            torch.testing.assert_close(module(x, **keywords), eager(x, **keywords))
    return tvmbridge.dispatch_report(module)


@pytest.mark.parametrize("make", NAMES)
def test_keywords_of_a_subclass_are_served_by_parameters(make: Callable[[str], str]) -> None:
    k = torch.randn(4)
    report = _call_alike(Named().eval(), [{make("k"): k}, {"k": k}, {make("k"): k}])
    assert not report.fallbacks


@pytest.mark.parametrize("make", NAMES)
def test_keywords_that_forward_sees_are_refused_by_name(make: Callable[[str], str]) -> None:
    k = torch.randn(4)
    report = _call_alike(Unnamed().eval(), [{"k": k}, {make("k"): k}, {"k": k}])
    ((reason, count),) = report.fallbacks.items()
    assert count == 3
    assert "the name of a keyword argument is not a plain str" in reason


def test_keywords_that_are_odd_are_served() -> None:
    report = _call_alike(Unnamed().eval(), [dict.fromkeys(PLAIN, torch.ones(4))])
    assert not report.fallbacks


@pytest.mark.parametrize("make", NAMES[:1])
def test_a_sample_may_have_such_keywords(make: Callable[[str], str]) -> None:
    module, x, k = Named().eval(), torch.randn(3, 4), torch.randn(4)
    tvmbridge.add_tvm_dispatch(module, x, sample_kwargs={make("k"): k}, on_fallback="raise")
    for _ in range(2):
        torch.testing.assert_close(module(x, **{make("k"): k}), module.layer(x) + k)


@pytest.mark.parametrize("value", [Hostile("k"), PLAIN[5]], ids=_kind)
def test_constants_of_calls(value: Any) -> None:
    class Chooses(Named):
        def forward(self, x: torch.Tensor, k: Any = None) -> torch.Tensor:
            return self.layer(x) * (2 if k == value else 3)

    _call_alike(Chooses().eval(), [{"k": value}, {"k": "other"}, {"k": value}])


@pytest.mark.parametrize("make", NAMES)
def test_keys_of_arguments_and_results(make: Callable[[str], str]) -> None:
    class Dicts(Named):
        def forward(self, x: torch.Tensor, k: Any = None) -> Any:
            return {make("k"): self.layer(x) + k[make("k")], PLAIN[5]: x * 2}

    report = _call_alike(Dicts().eval(), [{"k": {make("k"): torch.ones(4)}}])
    assert not report.fallbacks


def test_names_of_attributes() -> None:
    class Reads(Named):
        def __init__(self) -> None:
            super().__init__()
            self.names = [*PLAIN[:-2], *(make("k") for make in NAMES)]
            for name in self.names:
                setattr(self, name, 1.5)

        def forward(self, x: torch.Tensor, k: Any = None) -> torch.Tensor:
            return self.layer(x) * sum(getattr(self, name) for name in self.names)

    _call_alike(Reads().eval(), [{}])


def test_names_of_modules_with_statistics() -> None:
    names = [name for name in (*PLAIN, "class") if "." not in name]

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.BatchNorm1d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.children():
                x = norm(x)
            return x

    module = Norms().train()
    eager, x = copy.deepcopy(module), torch.randn(3, 4)
    tvmbridge.add_tvm_dispatch(module, x, on_fallback="raise")
    torch.testing.assert_close(module(x), eager(x))
    torch.testing.assert_close(module.state_dict(), eager.state_dict())


def test_names_of_sizes() -> None:
    symbol = sympy.Symbol(
        "__import__('tests.core.test_generated').EXECUTED.append(1)", integer=True
    )
    shapes = {0: (symbol, 2 * symbol)}
    guards = (sympy.Ne(sympy.Mod(symbol, 5), 0),)
    relations = Relations(shapes, {symbol: (2, 9)}, guards)
    fits = sizes_check([torch.ones(3, 6)], relations, lambda leaves: [t.shape for t in leaves])
    assert fits([torch.ones(4, 8)])
    for shape in ((4, 9), (5, 10), (12, 24)):
        assert not fits([torch.ones(shape)])


@pytest.mark.parametrize(
    "value", [Hostile("floor"), np.str_("floor"), np.float64(2.0), Wild(2)], ids=_kind
)
def test_constants_of_graphs(value: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(3)
    if isinstance(value, str):
        made = graph.call_function(torch.div, (x, 2.0), {"rounding_mode": value})
        expected = torch.floor(torch.arange(3.0) / 2)
    else:
        made, expected = graph.call_function(torch.mul, (x, value)), torch.arange(3.0) * 2
    graph.output((made,))
    read = read_graph(_module(graph))
    (result,) = read.module([])(torch.arange(3.0))
    torch.testing.assert_close(result, expected)


def _module(graph: fx.Graph) -> Any:
    module = fx.GraphModule.__new__(fx.GraphModule)
    nn.Module.__init__(module)
    module._graph = graph
    return module
