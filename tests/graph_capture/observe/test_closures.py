"""Functions with free variables are found by their code, with one search for all of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tvmbridge.graph_capture.observe import closures
from tvmbridge.graph_capture.observe.closures import Closures


def made(number: int) -> Callable[..., Any]:
    """Return a function with a free variable, and with code that no other call returns."""
    function: Callable[..., Any] = eval(f"(lambda scale: lambda x: x * scale + {number})(2)")
    return function


def finds(search: Closures, function: Any, known: Iterable[object] = ()) -> bool:
    return any(found is function for found in search.of(function.__code__, known))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The searches for frozen functions that have begun."""
    begun: list[object] = []
    genuine = closures.reachable_functions

    def counted(known: Iterable[object]) -> Iterator[Any]:
        begun.append(known)
        return genuine(known)

    monkeypatch.setattr(closures, "reachable_functions", counted)
    before = gc.get_freeze_count()
    yield begun
    if not before:
        gc.unfreeze()


def test_one_search_finds_all_frozen_functions(searches: list[object]) -> None:
    functions = [made(number) for number in range(5)]
    gc.freeze()
    search = Closures()
    assert all(finds(search, function, [functions]) for function in functions)
    assert len(searches) == 1


def test_functions_that_are_not_frozen_need_no_search_for_frozen_ones(
    searches: list[object],
) -> None:
    function, search = made(0), Closures()
    assert finds(search, function)
    assert searches == []


def test_functions_of_the_same_code_are_all_found() -> None:
    def scaling(scale: int) -> Callable[[int], int]:
        return lambda x: x * scale

    functions = [scaling(scale) for scale in range(3)]
    search = Closures()
    assert all(finds(search, function) for function in functions)


def test_nothing_is_held_in_the_end() -> None:
    function, search = made(1), Closures()
    assert finds(search, function)
    gone = weakref.ref(function)
    del function
    assert gone() is not None
    search.forget()
    assert gone() is None
