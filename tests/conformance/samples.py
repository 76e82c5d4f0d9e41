"""The cases of an operator: PyTorch's own samples, and variants of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.case import Case, case_of, variants
from tests.conformance.coverage import (
    UNDEFINED_VALUES,
    every_operator,
    operators,
    special_operators,
)
from tests.conformance.made import Made

DEVICE_VARIABLE = "TVMBRIDGE_CONFORMANCE_DEVICE"

# Eager PyTorch answers an infinity with NaN or not by where in the tensor it stands (gelu), or is
# never given one (the derivative of softmax).
_FINITE_ONLY = frozenset({"nn.functional.gelu", "_softmax_backward_data"})

# Which elements NaN or an infinity spoils depends on the block in which PyTorch's kernel meets it.
_ORDINARY_ONLY = frozenset({"nn.functional.scaled_dot_product_attention"})

# Of no elements PyTorch's own backward ends the process.
_BACKWARD_CRASHES_OF_NOTHING = frozenset({"nn.functional.pdist"})

# Of no elements its kernel returns whatever the memory held.
_UNDEFINED_OF_NOTHING = frozenset({"nn.functional.multi_margin_loss"})

# Of dimensions of stride 0 their kernels read and write past the memory.
_NOT_EXPANDED = frozenset({"masked.median", "median", "nanmedian"})

# What they grow a tensor by is whatever the memory held.
_NOT_GROWN = frozenset({"resize_", "resize_as_"})

# How much memory they take, or read past their tensors, is told by the values of integers.
_SIZED_BY_VALUES = frozenset(
    {
        "_segment_reduce",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "bincount",
        "nn.functional.ctc_loss",
        "nn.functional.one_hot",
        "repeat_interleave",
        "tensor_split",
    }
)


def _is_defined(name: str, case: Case, gradient: bool) -> bool:
    """Whether eager PyTorch says what a variant of a sample, or its ``gradient``, gives."""
    kind = case.label.split(" ", 1)[1]
    if name in _NOT_GROWN and kind in ("empty", "scalar"):
        return False
    if name in _NOT_EXPANDED and kind == "expanded":
        return False
    if case.ordinary:
        return True
    return name not in _UNDEFINED_OF_NOTHING | (_BACKWARD_CRASHES_OF_NOTHING if gradient else set())


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


def choose(cases: list[Case], limit: int) -> list[Case]:
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


def device() -> str:
    """The device type that samples are on, of this run and its workers."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def cases_of_samples(samples: Iterable[Any]) -> list[Case]:
    """A case of each sample, labelled by its number."""
    return [case_of(str(i), sample) for i, sample in enumerate(samples)]


def cases_of(name: str, dtype: torch.dtype, limit: int, *, gradient: bool = False) -> list[Case]:
    """The cases of one operator and dtype, always the same ones in the same order.

    With a ``limit`` the variants of the first suitable sample are on top of it.
    """
    op = operators()[name]
    torch.manual_seed(0)
    samples = list(op.sample_inputs(device(), dtype, requires_grad=gradient))
    plain = cases_of_samples(samples)
    cases = choose(plain, limit)
    for case in [c for c in plain if any(t.numel() > 8 for t in c.tensors)][:1]:
        special = None if name in _ORDINARY_ONLY else "finite" if name in _FINITE_ONLY else "all"
        cases += [v for v in variants(case, special) if _is_defined(name, v, gradient)]
        strided = case_of(f"{case.label} strided", samples[int(case.label)].noncontiguous())
        cases.append(strided)
    return cases


def special_cases(name: str, dtype: torch.dtype, limit: int, *, gradient: bool) -> list[Case]:
    """The samples of one operator and dtype that special values may be strewn over."""
    if name.split(":")[0] in UNDEFINED_VALUES | _SIZED_BY_VALUES:
        return []
    torch.manual_seed(0)
    op = special_operators()[name]
    samples = op.sample_inputs(device(), dtype, requires_grad=gradient)
    ordinary = [case for case in cases_of_samples(samples) if case.ordinary]
    return ordinary if isinstance(op, Made) else choose(ordinary, limit)


def accuracy_cases(name: str, dtype: torch.dtype, limit: int, *, gradient: bool) -> list[Case]:
    """The samples of one operator and dtype with the most elements; none of what is undefined."""
    if name.split(":")[0] in UNDEFINED_VALUES:
        return []
    torch.manual_seed(0)
    samples = every_operator()[name].sample_inputs(device(), dtype, requires_grad=gradient)
    cases = [case for case in cases_of_samples(samples) if case.ordinary]
    cases.sort(key=lambda case: -sum(t.numel() for t in case.tensors))
    return cases[: limit or None]
