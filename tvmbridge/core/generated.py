"""Generated source: Python text that tvmbridge writes and runs, and how values get into it.

The text may contain names and constants of users. A value is written as its ``repr`` only if its
type is exactly ``str``, ``int``, ``bytes``, ``bool`` or None: a subclass may have another ``repr``,
which may even be code. Any other value is bound to a new name, and the text contains the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Python refuses to convert longer integers to text.
_LONGEST_INTEGER = 1024


def plain_text(text: str) -> str:
    """Return ``text`` as a plain ``str`` with the same characters, if it is of a subclass."""
    return text if type(text) is str else str.__str__(text)


def is_literal(value: Any) -> bool:
    """Whether the ``repr`` of ``value`` is a literal of Python that means ``value``."""
    if type(value) is int:
        return value.bit_length() <= _LONGEST_INTEGER
    return value is None or type(value) in (str, bytes, bool)


class Scope:
    """The globals of generated source; all generated source is run by this class.

    Args:
        names: the initial global variables of the source.

    Example:
        >>> scope = Scope({"limit": 3})
        >>> text = f"def f(x): return x < limit and x != {scope.literal('a')}"
        >>> scope.function("f", text, "<example>")(2)
        True
    """

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self._names: dict[str, Any] = dict(names or {})

    def set(self, name: str, value: Any) -> None:
        """Set the global variable ``name``; the name must come from tvmbridge, not from a user."""
        self._names[name] = value

    def bind(self, kind: str, value: Any) -> str:
        """Bind ``value`` to a new name that begins with ``kind``, and return the name."""
        name = f"{kind}{len(self._names)}"
        self._names[name] = value
        return name

    def literal(self, value: Any, kind: str = "value") -> str:
        """Return the text of ``value``: a literal, or a new name that is bound to it."""
        return repr(value) if is_literal(value) else self.bind(kind, value)

    def function(self, name: str, source: str, file: str) -> Any:
        """Run ``source``, and return the function ``name`` that it defines.

        Args:
            source: Python text, in which :meth:`literal` wrote the values.
            file: the file name that tracebacks show for the source.
        """
        exec(compile(source, file, "exec"), self._names)
        return self._names[name]
