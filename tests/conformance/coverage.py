"""Which operators the conformance run takes from PyTorch's operator tests (OpInfo), and more."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo import core

from tests.conformance.extras import EXTRAS
from tests.conformance.made import LONG, MADE

# Random operators are wrapped to seed the generator themselves, which no capture can follow.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

# Families with kernels of their own kind, which no model of the usual sort has in its forward.
_LEFT_OUT_PREFIXES = ("fft.", "sparse.", "special.", "torch.", "jiterator")
_LINALG_KEPT = frozenset(
    {
        "linalg.cross",
        "linalg.diagonal",
        "linalg.matrix_norm",
        "linalg.matrix_power",
        "linalg.multi_dot",
        "linalg.norm",
        "linalg.vander",
        "linalg.vecdot",
        "linalg.vector_norm",
    }
)
_DECOMPOSITIONS = frozenset(
    {
        "cholesky",
        "cholesky_inverse",
        "cholesky_solve",
        "geqrf",
        "logdet",
        "lu",
        "lu_solve",
        "lu_unpack",
        "ormqr",
        "pca_lowrank",
        "pinverse",
        "qr",
        "svd",
        "svd_lowrank",
        "triangular_solve",
        "istft",
        "stft",
    }
)
_COMPLEX_OR_SPARSE = frozenset(
    {
        "cdouble",
        "cfloat",
        "chalf",
        "complex",
        "imag",
        "polar",
        "to_sparse",
        "view_as_complex",
        "view_as_real",
    }
)

# Their elements are whatever the memory held.
UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


def full_name(op: Any) -> str:
    """The operator's name with its variant, as ``name`` or ``name:variant``."""
    variant = op.variant_test_name
    return f"{op.name}:{variant}" if variant else str(op.name)


def is_covered(op: Any) -> bool:
    """Whether the operator belongs to what conformance covers."""
    name = op.name
    if name.startswith("linalg."):
        return name in _LINALG_KEPT
    return not name.startswith(_LEFT_OUT_PREFIXES) and name not in (
        _DECOMPOSITIONS | _COMPLEX_OR_SPARSE
    )


@functools.cache
def operators() -> dict[str, Any]:
    """The covered operators by full name, those that OpInfo lacks behind the others."""
    covered = [op for op in common_methods_invocations.op_db if is_covered(op)]
    return {full_name(op): op for op in (*covered, *EXTRAS)}


@functools.cache
def special_operators() -> dict[str, Any]:
    """The covered operators, and those that are made for special values."""
    return {**operators(), **{full_name(op): op for op in MADE}}


@functools.cache
def operators_with_long_rows() -> dict[str, Any]:
    """The covered operators, and those that are made for accuracy."""
    return {**operators(), **{full_name(op): op for op in LONG}}


def every_operator() -> dict[str, Any]:
    """All operators that any check covers."""
    return special_operators() | operators_with_long_rows()


# Beside those that OpInfo has among its elementwise operators.
_LOCAL = frozenset({"addcdiv", "masked_fill", "nn.functional.pad", "where"})

# The one or the other of two equal numbers is the result: 0.0 or -0.0, told by the instruction.
_CHOOSING = frozenset({"clamp", "clamp_max", "clamp_min", "max", "maximum", "min", "minimum"})


def is_local(op: Any) -> bool:
    """Whether each element of the results comes of those at its place in the operands alone."""
    kinds = (core.UnaryUfuncInfo, core.BinaryUfuncInfo, core.ShapeFuncInfo)
    return isinstance(op, kinds) or op.name in _LOCAL or getattr(op, "local", False)


def chooses(op: Any) -> bool:
    """Whether the operator hands on one of its operands' numbers, of equal ones either."""
    return op.name in _CHOOSING


def left_out() -> Counter[str]:
    """How many operators of OpInfo are not covered, by what they are left out as."""
    counts: Counter[str] = Counter()
    for op in common_methods_invocations.op_db:
        if not is_covered(op):
            prefix = op.name.split(".")[0] + "." if "." in op.name else op.name
            groups = {"complex": _COMPLEX_OR_SPARSE, "matrix decompositions": _DECOMPOSITIONS}
            counts[next((g for g, names in groups.items() if op.name in names), prefix)] += 1
    return counts
