"""The quick set: operators that native converters serve, few samples of each."""

from __future__ import annotations

QUICK_DTYPES = ("float32", "float64", "int64", "bool")
QUICK_LIMIT = 4

QUICK_OPERATORS = tuple(
    """
    add sub rsub mul true_divide:x
    """.split()
)
