"""Namespaces: globals and modules that forward searches by names that its code may not say.

``globals()["SCALE"]``, ``vars(settings)``, ``getattr(settings, name)``, ``sys.modules["settings"]``
and the like: whatever is data in such a one is watched.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tvmbridge.core.contents import MISSING
from tvmbridge.graph_capture.observe.executed import Executed, is_library
from tvmbridge.graph_capture.observe.mentions import Ending, Mention
from tvmbridge.graph_capture.observe.sources import Place

_IMPORTING = (importlib.import_module, builtins.__import__)


class Namespace(NamedTuple):
    """Names with their values, and what stands before the names in messages."""

    label: str
    values: dict[str, Any]

    def places(self) -> Iterator[Place]:
        """Where each of its values is; iterators and special names are left out."""
        for name, value in list(self.values.items()):
            special = name.startswith("__") and name.endswith("__")
            if not special and not isinstance(value, Iterator):
                yield Place(self.values, self.values, name, f"{self.label}{name}", value)

    def missing(self, names: Iterable[str]) -> Iterator[Place]:
        """Where those of ``names`` would be that are not there."""
        for name in names:
            if name not in self.values:
                yield Place(self.values, self.values, name, f"{self.label}{name}", MISSING)


def searched(executed: Executed, mention: Mention, passed: Sequence[Place]) -> Iterator[Namespace]:
    """The namespaces that a function may search with what its ``mention`` leads to."""
    value = passed[-1].value
    if value is builtins.globals:
        yield Namespace("", executed.globals)
    elif value is sys.modules or any(value is f for f in _IMPORTING):
        own = (
            {str(executed.globals.get("__name__"))} if "__name__" in executed.code.co_names else ()
        )
        for name in sorted({*executed.mentions.strings, *own}):
            yield from _of_module(sys.modules.get(name))
    elif mention.ending is not Ending.BOUND:
        yield from _of_module(value)


def _of_module(module: Any) -> Iterator[Namespace]:
    if isinstance(module, types.ModuleType) and not is_library(module.__name__):
        yield Namespace(f"{module.__name__}.", vars(module))
