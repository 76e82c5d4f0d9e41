"""Generated source: Python text that the product writes and runs, and how values get into it.

Names and constants of users reach such text. The text of a value is its ``repr`` only where the
value is exactly a ``str``, ``int``, ``bytes``, ``bool`` or None: a subclass has a ``repr`` of its
own, which is no literal or is code. The text of another value is a name that is bound to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Python refuses to convert longer integers to text.
_LONGEST_INTEGER = 1024


def plain_text(text: str) -> str:
    """``text`` as exactly a ``str``: the same characters, whatever subclass holds them."""
    return text if type(text) is str else str.__str__(text)


def is_literal(value: Any) -> bool:
    """Whether the ``repr`` of ``value`` is a literal of Python that means ``value``."""
    if type(value) is int:
        return value.bit_length() <= _LONGEST_INTEGER
    return value is None or type(value) in (str, bytes, bool)


class Scope:
    """The globals of generated source, and the one place that runs such source.

    Args:
        names: values that the source knows by these names.

    Example:
        >>> scope = Scope({"limit": 3})
        >>> text = f"def f(x): return x < limit and x != {scope.literal('a')}"
        >>> scope.function("f", text, "<example>")(2)
        True
    """

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self._names: dict[str, Any] = dict(names or {})

    def set(self, name: str, value: Any) -> None:
        """Let the source know ``value`` by ``name``, which the product has chosen."""
        self._names[name] = value

    def bind(self, kind: str, value: Any) -> str:
        """A new name for ``value``, which begins with ``kind``."""
        name = f"{kind}{len(self._names)}"
        self._names[name] = value
        return name

    def literal(self, value: Any, kind: str = "value") -> str:
        """The text of ``value``: a literal, or a new name that is bound to it."""
        return repr(value) if is_literal(value) else self.bind(kind, value)

    def function(self, name: str, source: str, file: str) -> Any:
        """Run ``source``, and return what it defines as ``name``.

        Args:
            name: of the function.
            source: text of Python, whose values were written by :meth:`literal`.
            file: what tracebacks call the source.
        """
        exec(compile(source, file, "exec"), self._names)
        return self._names[name]
