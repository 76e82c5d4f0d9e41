"""Iterators outside the module: taking an item from them cannot be undone after a capture."""

from __future__ import annotations

from collections.abc import Set

from tvmbridge.core.contents import attributes_of
from tvmbridge.graph_capture.observe.data import holds_iterator, is_object
from tvmbridge.graph_capture.observe.sources import Source


class Iterators:
    """The iterators that functions of forward may take items from."""

    def __init__(self) -> None:
        # The label of each iterator, and the name of the attribute if an object holds it.
        self._found: list[tuple[str, str | None]] = []

    def note(self, source: Source) -> None:
        """Record the iterators at ``source``."""
        if is_object(source.value):
            for name, held in attributes_of(source.value).items():
                if holds_iterator(held):
                    self._found.append((f"{source.label}.{name}", name))
        elif holds_iterator(source.value):
            self._found.append((source.label, None))

    def used(self, names: Set[str], searching: bool) -> str | None:
        """Return the label of an iterator that functions may use; None if there is none.

        Args:
            searching: whether they may look up attributes by computed names.
        """
        used = (n for n, name in self._found if searching or name is None or name in names)
        return next(used, None)
