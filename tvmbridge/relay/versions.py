"""The versions of Relay that a text can be written for, and how they differ.

The text format is the same from 0.11 to 0.17. Operators that no converter uses are left out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# Relay's parser does not know the attributes of these operators by itself.
ATTRIBUTES: Final = MappingProxyType(
    {
        "cumprod": "ScanopAttrs",
        "cumsum": "ScanopAttrs",
        "scatter": "ScatterAttrs",
        "scatter_add": "ScatterAddAttrs",
        "scatter_elements": "ScatterElementsAttrs",
    }
)

VERSIONS: Final = ("0.17", "0.14", "0.11")

# 0.12 replaced ``scatter`` and ``scatter_add`` by ``scatter_elements``.
OPERATORS_ABSENT: Final = MappingProxyType(
    {
        "0.17": frozenset({"scatter", "scatter_add"}),
        "0.14": frozenset({"scatter", "scatter_add"}),
        "0.11": frozenset({"scatter_elements"}),
    }
)
