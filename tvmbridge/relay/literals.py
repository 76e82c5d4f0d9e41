"""Write dtypes, types, numbers and attributes in Relay's text format."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Sequence
from typing import Any

import torch

from tvmbridge.relay.registry import ALL, Refused

# The suffixes of numbers in the text. Relay's tokenizer has none for unsigned integers.
_SUFFIXES = {
    torch.float32: "f",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "",
    torch.int64: "i64",
}
_NO_LETTER = re.compile(r"[^0-9A-Za-z_]+")


def dtype_text(dtype: torch.dtype) -> str:
    """Return Relay's name of a dtype.

    Raises:
        Refused: no converter knows the dtype.
    """
    if dtype not in ALL:
        raise Refused(f"the dtype {str(dtype).removeprefix('torch.')}")
    return str(dtype).removeprefix("torch.")


def type_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return the type of a tensor, as in ``Tensor[(2, 3), float32]``."""
    return f"Tensor[({', '.join(str(int(n)) for n in shape)}), {dtype_text(dtype)}]"


def number_text(value: float, dtype: torch.dtype) -> str | None:
    """Return a number of a dtype; None if the text format cannot write it."""
    if dtype is torch.bool:
        return str(bool(value))
    if dtype not in _SUFFIXES or not math.isfinite(value):
        return None
    plain = repr(float(value)) if dtype.is_floating_point else str(int(value))
    return plain + _SUFFIXES[dtype]


def attribute_text(value: Any) -> str:
    """Return the value of an attribute of a call."""
    if isinstance(value, torch.dtype):
        return f'"{dtype_text(value)}"'
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(attribute_text(v) for v in value)}]"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Refused(f"an attribute of {value}")
        return f"{value!r}f"
    return str(value)


def name_text(name: str, taken: Container[str]) -> str:
    """Return ``name`` as the name of a Relay variable, unlike all names in ``taken``."""
    plain = _NO_LETTER.sub("_", name)
    plain = plain if re.match("[A-Za-z_]", plain) else f"v_{plain}"
    unique, number = plain, 1
    while unique in taken:
        unique, number = f"{plain}_{number}", number + 1
    return unique
