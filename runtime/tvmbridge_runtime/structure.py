"""Puts the results of code into the structure that forward returned them in."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Mapping, Sequence
from typing import Any


def rebuilt(structure: Mapping[str, Any], results: Sequence[Any]) -> Any:
    """Return ``results`` as ``structure`` says: containers, constants and numbers of results.

    A container of a class that the runtime does not know is a dict of what it holds.
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
