"""Closures: find functions with free variables by their code.

A frame does not refer to its function, so the function is searched among all objects. Such a search
takes about a tenth of a second, and a model may have a hundred such functions. So what a search
has passed is kept for the next ones.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator

from tvmbridge.graph_capture.observe.frozen import reachable_functions


class Closures:
    """The functions with free variables that searches have found, until :meth:`forget`."""

    def __init__(self) -> None:
        self._found: dict[int, list[types.FunctionType]] = {}
        self._begun = False
        # A search of functions that ``gc.freeze()`` hides, which goes on where it has stopped.
        self._hidden: Iterator[types.FunctionType] | None = None

    def of(self, code: types.CodeType, known: Iterable[object]) -> Iterator[types.FunctionType]:
        """Yield the functions with this code, some of them twice.

        Args:
            known: where the search of hidden functions begins, beside the user's Python modules.
        """
        return (f for f in self._candidates(code, known) if f.__code__ is code)

    def _candidates(
        self, code: types.CodeType, known: Iterable[object]
    ) -> Iterator[types.FunctionType]:
        if not self._begun:
            self._keep(gc.get_objects())
            self._begun = True
        yield from list(self._found.get(id(code), ()))
        if self._hidden is None:
            # The count takes long where many objects are frozen.
            self._hidden = reachable_functions(known) if gc.get_freeze_count() else iter(())
        for function in self._hidden:
            self._keep([function])
            yield function
        # The function may be newer than the searches.
        yield from (f for f in gc.get_referrers(code) if type(f) is types.FunctionType)
        if gc.get_freeze_count():
            yield from reachable_functions(known)

    def forget(self) -> None:
        """Let go of all functions, and of what their free variables hold."""
        self._found.clear()
        self._begun, self._hidden = False, None

    def _keep(self, among: Iterable[object]) -> None:
        for function in among:
            if type(function) is types.FunctionType and function.__closure__:
                self._found.setdefault(id(function.__code__), []).append(function)
