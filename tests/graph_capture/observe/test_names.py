"""The names of globals in a code object are distinguished from attributes, for all opcodes."""

from __future__ import annotations

import dis
from typing import Any

import pytest

from tvmbridge.graph_capture.observe.names import asks_type, names_of, searches


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


def _finds(x: Any, name: str, default: Any) -> Any:
    return (
        getattr(x, "a"),  # noqa: B009
        getattr(x.b.c, "d", []),
        getattr(x, "e", None),
        getattr(x, "f", default),
        getattr(x, "g", 0),
    )


def _computes(x: Any, name: str) -> Any:
    return getattr(x, "a", 1), getattr(x, name)


def _chooses(x: Any, some: bool) -> Any:
    return getattr(x, "a" if some else "b" + str(x))


def _changes(x: Any) -> Any:
    return getattr(x, "a".upper())


def _adds(x: Any, name: str) -> Any:
    return getattr(x, "a" + name, None)


def _passes_on(x: Any) -> Any:
    return list(map(getattr, x, "ab"))


def _renames(x: Any, name: str) -> Any:
    get = getattr
    return get(x, name), getattr(x, "a")  # noqa: B009


def _of_attributes(x: Any) -> Any:
    return dis.getattr(x, "a"), x.__dict__  # type: ignore[attr-defined]


def test_names_of_attributes_are_constants() -> None:
    assert not searches(_finds.__code__)
    assert not searches(_compares.__code__)


@pytest.mark.parametrize(
    "function", [_computes, _chooses, _changes, _adds, _passes_on, _renames, _of_attributes]
)
def test_names_of_attributes_are_computed(function: Any) -> None:
    assert searches(function.__code__)


def test_names_of_opcodes_that_are_not_known_count_as_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dis, "hasname", [])
    code = _reads.__code__.replace(co_name="another")
    assert names_of(code).globals == set(code.co_names)
