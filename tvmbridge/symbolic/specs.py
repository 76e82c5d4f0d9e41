"""Specs of kernels with sizes in them: see :mod:`tvmbridge.kernels.sized`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tvmbridge.kernels.sized import SIZE
from tvmbridge.symbolic.sizes import Sizes

MARK = "sized:"


def generalize_spec(texts: Sequence[str], sizes: Sizes) -> str | None:
    """The spec of which ``texts`` are the instances at the points of ``sizes``; None: none is."""
    try:
        parsed = [json.loads(text) for text in texts]
        return MARK + json.dumps(_merged(parsed, sizes))
    except (ValueError, KeyError):
        return None


def _merged(values: Sequence[Any], sizes: Sizes) -> Any:
    first = values[0]
    if any(type(v) is not type(first) for v in values):
        raise ValueError("values of several types")
    if isinstance(first, dict):
        if any(list(v) != list(first) for v in values):
            raise ValueError("other keys")
        return {key: _merged([v[key] for v in values], sizes) for key in first}
    if isinstance(first, list):
        return [_merged(items, sizes) for items in zip(*values, strict=True)]
    if all(v == first for v in values):
        return first
    if type(first) is not int:
        raise ValueError("other values")
    size = sizes.find_divided(tuple(values))
    if size is None:
        raise ValueError("a number that is no size")
    return {SIZE: [size.terms, size.divisor, size.remainder]}
