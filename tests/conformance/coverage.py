"""The operators that conformance covers: from PyTorch's operator tests (OpInfo), and our own."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo import core

from tests.conformance.extras import EXTRAS
from tests.conformance.made import LONG, MADE

# OpInfo wraps random operators to seed the generator, which torch.export cannot capture.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

# Groups of operators with special kernels that usual models do not call in forward.
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

# Operators that return uninitialized memory.
UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


def full_name(op: Any) -> str:
    """Return the operator's name with its variant, as ``name`` or ``name:variant``."""
    variant = op.variant_test_name
    return f"{op.name}:{variant}" if variant else str(op.name)


def is_covered(op: Any) -> bool:
    """Whether conformance covers the operator."""
    name = op.name
    if name.startswith("linalg."):
        return name in _LINALG_KEPT
    return not name.startswith(_LEFT_OUT_PREFIXES) and name not in (
        _DECOMPOSITIONS | _COMPLEX_OR_SPARSE
    )


@functools.cache
def operators() -> dict[str, Any]:
    """Return the covered operators by full name: first OpInfo's, then the ones of ``extras.py``."""
    covered = [op for op in common_methods_invocations.op_db if is_covered(op)]
    return {full_name(op): op for op in (*covered, *EXTRAS)}


@functools.cache
def special_operators() -> dict[str, Any]:
    """Return the covered operators and the made-up ones that test special values."""
    return {**operators(), **{full_name(op): op for op in MADE}}


@functools.cache
def operators_with_long_rows() -> dict[str, Any]:
    """Return the covered operators and the made-up ones that test accuracy on long rows."""
    return {**operators(), **{full_name(op): op for op in LONG}}


def every_operator() -> dict[str, Any]:
    """Return all operators that any check covers."""
    return special_operators() | operators_with_long_rows()


# Operators that are local, although OpInfo does not list them as elementwise.
_LOCAL = frozenset({"addcdiv", "masked_fill", "nn.functional.pad", "where"})

# Operators that return either of two equal numbers; the instruction decides between 0.0 and -0.0.
_CHOOSING = frozenset({"clamp", "clamp_max", "clamp_min", "max", "maximum", "min", "minimum"})


def is_local(op: Any) -> bool:
    """Whether each result element depends only on the operands' elements at the same place."""
    kinds = (core.UnaryUfuncInfo, core.BinaryUfuncInfo, core.ShapeFuncInfo)
    return isinstance(op, kinds) or op.name in _LOCAL or getattr(op, "local", False)


def chooses(op: Any) -> bool:
    """Whether the operator returns one of its operands' numbers, and either of equal ones."""
    return op.name in _CHOOSING


def left_out() -> Counter[str]:
    """Count the operators of OpInfo that are not covered, by the reason they are left out."""
    counts: Counter[str] = Counter()
    for op in common_methods_invocations.op_db:
        if not is_covered(op):
            prefix = op.name.split(".")[0] + "." if "." in op.name else op.name
            groups = {"complex": _COMPLEX_OR_SPARSE, "matrix decompositions": _DECOMPOSITIONS}
            counts[next((g for g, names in groups.items() if op.name in names), prefix)] += 1
    return counts
