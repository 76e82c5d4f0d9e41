"""The names of globals in a code object are distinguished from attributes, for all opcodes."""

from __future__ import annotations

import dis
from typing import Any

import pytest

from tvmbridge.graph_capture.observe.names import asks_type, names_of


def _reads(x: Any) -> Any:
    import json.decoder as found

    if x is pytest.mark or x is x.other or x.kind == dis.opname:
        return found.JSONDecoder, x.scale, getattr(x, "factor")  # noqa: B009
    return None


def _compares(x: Any, y: Any) -> bool:
    return x is None or x is pytest.mark or x is y.dis


def _compares_with_globals(x: Any) -> bool:
    return x is None or x is pytest.mark or x.kind is dis.opname or dis.opname is None


def _writes(x: Any) -> None:
    global WRITTEN
    WRITTEN = x
    x.own = x


def _loads_nothing() -> None:
    while True:
        pass


def test_code_that_loads_nothing_asks_for_no_type() -> None:
    """Since Python 3.12, a function that returns a constant loads nothing."""
    assert not asks_type(_loads_nothing.__code__)


def test_globals_attributes_and_imports_are_told_apart() -> None:
    names = names_of(_reads.__code__)
    assert names.globals == {"pytest", "dis", "getattr"}
    assert {"mark", "opname", "JSONDecoder", "scale", "other", "factor"} <= names.looked_up
    assert names.strings == {"factor"}
    assert names.modules == {"json.decoder"}
    assert {"pytest", "mark"} <= names.identified
    assert {"dis", "opname"} <= names.compared - names.identified
    assert names.asks_identity
    assert names_of(_compares.__code__).asks_identity
    assert not names_of(_compares_with_globals.__code__).asks_identity
    assert names_of(_writes.__code__).globals == {"WRITTEN"}


def test_names_of_opcodes_that_are_not_known_count_as_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dis, "hasname", [])
    code = _reads.__code__.replace(co_name="another")
    assert names_of(code).globals == set(code.co_names)
