"""Kernel specs in which sizes depend on symbols: see :mod:`tvmbridge.kernels.sized`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tvmbridge.kernels.sized import SIZE
from tvmbridge.symbolic.descriptions import merged
from tvmbridge.symbolic.sizes import DifferentCodeError, Size, Sizes

MARK = "sized:"


def generalize_spec(texts: Sequence[str], sizes: Sizes) -> str | None:
    """Return one spec with symbolic sizes for ``texts``, the specs at the points of ``sizes``.

    None: the specs differ in more than sizes, or are no specs.
    """
    try:
        spec = merged([json.loads(text) for text in texts], sizes, "a spec")
    except (ValueError, DifferentCodeError):
        return None
    return MARK + json.dumps(spec, default=_encoded)


def _encoded(size: Size) -> dict[str, Any]:
    return {SIZE: [size.terms, size.divisor, size.remainder, size.atom_fields]}
