"""Specs of kernels that contain symbolic sizes, see :mod:`tvmbridge.kernels.sized`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tvmbridge.kernels.sized import SIZE
from tvmbridge.symbolic.descriptions import merged
from tvmbridge.symbolic.size import Size
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes

MARK = "sized:"


def generalize_spec(texts: Sequence[str], sizes: Sizes) -> str | None:
    """Combine specs, one for each point of ``sizes``, into a symbolic spec; None if impossible."""
    try:
        spec = merged([json.loads(text) for text in texts], sizes, "a spec")
    except (ValueError, DifferentCodeError):
        return None
    return MARK + json.dumps(spec, default=_encoded)


def _encoded(size: Size) -> dict[str, Any]:
    return {SIZE: [size.terms, size.divisor, size.remainder, size.atom_fields]}
