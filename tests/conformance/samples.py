"""Which operators and samples the conformance run takes from PyTorch's own operator tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

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

# Eager PyTorch answers an infinity with NaN or not by where in the tensor it stands (gelu), or is
# never given one (the derivative of softmax).
_FINITE_ONLY = frozenset({"nn.functional.gelu", "_softmax_backward_data"})

_SPECIAL_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-6, -1e-6, 100.0, -100.0)


@dataclass(frozen=True)
class Case:
    """One call of an operator: the flattened arguments, of which tensors become inputs."""

    label: str
    leaves: tuple[Any, ...]
    spec: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def ordinary(self) -> bool:
        """Whether no tensor of the case is empty."""
        return all(t.numel() for t in self.tensors)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``tensors`` in the places of the case's own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


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
    """The covered operators by full name."""
    return {full_name(op): op for op in common_methods_invocations.op_db if is_covered(op)}


def _flatten(op: Any, label: str, sample: Any) -> Case:
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Case(label, tuple(detached), spec)


def _with_special_values(case: Case, *, finite: bool) -> Case | None:
    """The case with NaN, infinities, zeros and extreme numbers strewn over its float tensors."""
    numbers = [n for n in _SPECIAL_FLOATS if not finite or abs(n) != float("inf")]
    changed = False
    leaves = list(case.leaves)
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        values = leaf.clone(memory_format=torch.contiguous_format).reshape(-1)
        for i, number in enumerate(numbers):
            at = (i * 2 + 5 * position) % values.numel()
            values[at] = number
        leaves[position] = values.reshape(leaf.shape)
        changed = True
    return Case(f"{case.label} special", tuple(leaves), case.spec) if changed else None


def _features(case: Case) -> Iterator[Any]:
    """What is particular about a case, for a choice of cases that differ."""
    args, kwargs = pytree.tree_unflatten(list(case.leaves), case.spec)
    yield tuple(type(a).__name__ for a in args)
    for name, value in kwargs.items():
        yield name
        yield name, str(value) if not isinstance(value, torch.Tensor) else "tensor"
    for position, leaf in enumerate(case.leaves):
        if isinstance(leaf, torch.Tensor):
            yield position, "rank", leaf.dim()
            yield position, "empty", leaf.numel() == 0
            yield position, "dtype", leaf.dtype
            yield position, "one", 1 in leaf.shape
        else:
            yield position, str(leaf)
            yield position, isinstance(leaf, int | float) and leaf < 0
    yield "shapes", len({t.shape for t in case.tensors}) > 1


def _choose(cases: list[Case], limit: int) -> list[Case]:
    """At most ``limit`` cases, each adding as much as possible that the others lack."""
    if not limit or len(cases) <= limit:
        return cases
    left = [(set(_features(case)), case) for case in cases[:400]]
    seen: set[Any] = set()
    chosen = []
    while left and len(chosen) < limit:
        best = max(range(len(left)), key=lambda i: (len(left[i][0] - seen), -i))
        features, case = left.pop(best)
        seen |= features
        chosen.append(case)
    return chosen


def cases_of(name: str, dtype: torch.dtype, limit: int) -> list[Case]:
    """The cases of one operator and dtype, always the same ones in the same order.

    With a ``limit`` the two variants of the first suitable samples are on top of it.
    """
    op = operators()[name]
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    plain = [_flatten(op, str(i), sample) for i, sample in enumerate(samples)]
    cases = _choose(plain, limit)
    sizable = [c for c in plain if any(t.numel() > 8 for t in c.tensors)][:1]
    special = [_with_special_values(case, finite=name in _FINITE_ONLY) for case in sizable]
    cases += [case for case in special if case is not None]
    for case in sizable:
        strided = samples[int(case.label)].noncontiguous()
        cases.append(_flatten(op, f"{case.label} strided", strided))
    return cases
