"""Facts about one value of a drawn function: type, bytes, submodule, source line and time."""

from __future__ import annotations

import linecache
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from tvmbridge.frontend.origins import origin_of
from tvmbridge.inspect.labels import full_type_text
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, shape_of


def facts_of(
    title: str,
    detail: str,
    var: relax.Var | None,
    expr: relax.Expr | None,
    seconds: Mapping[relax.Var, float],
) -> dict[str, Any]:
    """Return the known facts about a value by name; unknown facts are left out."""
    known: dict[str, Any] = {"operator": title, "attributes": detail}
    if var is not None:
        known |= {"variable": var.name, "type": full_type_text(var.ty), "bytes": nbytes(var.ty)}
        known["seconds"] = seconds.get(var)
    origin = origin_of(expr)
    if origin is not None:
        known["submodule"] = origin.modules[-1][0] if origin.modules else ""
        if origin.file:
            known["source"] = f"{Path(origin.file).name}:{origin.line} in {origin.function}"
            known["code"] = linecache.getline(origin.file, origin.line).strip()
    return {name: value for name, value in known.items() if value not in (None, "")}


def nbytes(ty: Any) -> int | None:
    """Return the bytes of a tensor, or of all tensors of a tuple; None if a size is unknown."""
    if isinstance(ty, tvm.ir.TupleType):
        fields = [nbytes(field) for field in ty.fields]
        return None if None in fields else sum(f for f in fields if f is not None)
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return None
    value = relax.Var("value", ty)
    shape = shape_of(value)
    try:
        return (
            None if shape is None else math.prod(shape) * from_relax_dtype(dtype_of(value)).itemsize
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # PyTorch does not have the dtype
