"""Rebuild the structure that forward returns from the results of the code."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Mapping, Sequence
from typing import Any


def rebuilt(structure: Mapping[str, Any], results: Sequence[Any]) -> Any:
    """Return ``results`` in the containers of ``structure``, together with its constants.

    A container whose class the runtime does not know becomes a dict of its parts.
    """
    kind = structure["kind"]
    if kind == "output":
        return results[structure["number"]]
    if kind == "constant":
        return structure["value"]
    parts = [rebuilt(part, results) for part in structure["parts"]]
    if kind == "tuple":
        return tuple(parts)
    if kind == "list":
        return parts
    if kind == "namedtuple":
        return namedtuple(structure["name"], structure["keys"])(*parts)
    container = OrderedDict if kind == "ordered" else dict
    return container(zip(structure["keys"], parts, strict=True))
