"""Check the sizes of arguments, and determine the sizes of symbols from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvmbridge_runtime.conditions import text_of, value_of
from tvmbridge_runtime.errors import ArgumentError


def sizes_of(manifest: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the value of each symbol of ``manifest``; None if it has no symbols.

    A size is ``scale * value + offset``, with the scale and the offset of its symbol.

    Raises:
        ArgumentError: a size differs from the exported one, is out of bounds or not of its form,
            sizes with one symbol differ, or a relation between sizes does not hold.
    """
    found: dict[str, tuple[int, str]] = {}
    bounds = {symbol["name"]: symbol for symbol in manifest["symbols"]}
    for spec, shape in zip(manifest["inputs"], shapes, strict=True):
        for axis, (wanted, extent) in enumerate(zip(spec["shape"], shape, strict=True)):
            place = f"argument {spec['name']!r}, dimension {axis}"
            if isinstance(wanted, int):
                if wanted != extent:
                    raise ArgumentError(
                        f"{place} is {extent}; the function was exported for {wanted} "
                        f"(it takes {spec['shape']})"
                    )
                continue
            known = found.setdefault(wanted, (extent, place))
            if known[0] != extent:
                raise ArgumentError(
                    f"{place} is {extent}, and {known[1]} is {known[0]}: both are "
                    f"{wanted} and must be equal"
                )
            least, most = bounds[wanted]["least"], bounds[wanted]["most"]
            if extent < least or (most is not None and extent > most):
                limit = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ArgumentError(
                    f"{place}, {wanted}, is {extent} and must be {limit}: export another function "
                    "for other sizes"
                )
            scale, offset = _form(bounds[wanted])
            if (extent - offset) % scale:
                multiple = f"a multiple of {scale}" + (f" plus {offset}" if offset else "")
                raise ArgumentError(f"{place}, {wanted}, is {extent} and must be {multiple}")
    sizes = {name: found[name][0] for name in bounds}
    for condition in manifest["relations"]:
        if not value_of(condition, sizes):
            told = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ArgumentError(f"sizes {told} do not fulfil {text_of(condition)}")
    forms = {name: _form(symbol) for name, symbol in bounds.items()}
    values = [(sizes[name] - offset) // scale for name, (scale, offset) in forms.items()]
    return values or None


def _form(symbol: Mapping[str, Any]) -> tuple[int, int]:
    return symbol.get("scale", 1), symbol.get("offset", 0)
