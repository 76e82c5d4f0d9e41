"""The cases of an operator: PyTorch's own samples, and variants of the samples."""

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

# For an infinity, eager PyTorch's gelu returns NaN or not depending on the element's position in
# the tensor; the derivative of softmax never receives an infinity.
_FINITE_ONLY = frozenset({"nn.functional.gelu", "_softmax_backward_data"})

# The blocks of PyTorch's kernel decide which result elements a NaN or an infinity spreads to.
_ORDINARY_ONLY = frozenset({"nn.functional.scaled_dot_product_attention"})

# PyTorch's own backward crashes the process if a tensor is empty.
_BACKWARD_CRASHES_OF_NOTHING = frozenset({"nn.functional.pdist"})

# PyTorch's kernel returns uninitialized memory if a tensor is empty.
_UNDEFINED_OF_NOTHING = frozenset(
    {"nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss"}
)

# PyTorch's kernels access memory out of bounds for dimensions of stride 0.
_NOT_EXPANDED = frozenset({"masked.median", "median", "nanmedian"})

# The elements that they add to a tensor are uninitialized memory.
_NOT_GROWN = frozenset({"resize_", "resize_as_"})

# Operators that take integer values as sizes or indices without a check: any value could exhaust
# the memory, or make them read out of bounds.
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
    """Whether eager PyTorch defines the result of a variant, and its gradient if asked for."""
    kind = case.label.split(" ", 1)[1]
    if name in _NOT_GROWN and kind in ("empty", "scalar"):
        return False
    if name in _NOT_EXPANDED and kind == "expanded":
        return False
    if case.ordinary:
        return True
    return name not in _UNDEFINED_OF_NOTHING | (_BACKWARD_CRASHES_OF_NOTHING if gradient else set())


def _features(case: Case) -> Iterator[Any]:
    """Yield the features of a case by which :func:`choose` picks cases that differ."""
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
    """Return at most ``limit`` cases, each with as many features as possible that others lack."""
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
    """Return the device type of the samples of this run and its workers."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def cases_of_samples(samples: Iterable[Any]) -> list[Case]:
    """Return a case for each sample, labelled by the sample's number."""
    return [case_of(str(i), sample) for i, sample in enumerate(samples)]


def cases_of(name: str, dtype: torch.dtype, limit: int, *, gradient: bool = False) -> list[Case]:
    """Return the cases of one operator and dtype, always the same cases in the same order.

    ``limit`` (0: none) bounds the samples. The variants of the first sample with a tensor of more
    than eight elements are added on top.
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
    """Return the samples of one operator and dtype that may be filled with special values."""
    if name.split(":")[0] in UNDEFINED_VALUES | _SIZED_BY_VALUES:
        return []
    torch.manual_seed(0)
    op = special_operators()[name]
    samples = op.sample_inputs(device(), dtype, requires_grad=gradient)
    ordinary = [case for case in cases_of_samples(samples) if case.ordinary]
    return ordinary if isinstance(op, Made) else choose(ordinary, limit)


def accuracy_cases(name: str, dtype: torch.dtype, limit: int, *, gradient: bool) -> list[Case]:
    """Return the samples with the most elements; none if the operator's values are undefined."""
    if name.split(":")[0] in UNDEFINED_VALUES:
        return []
    torch.manual_seed(0)
    samples = every_operator()[name].sample_inputs(device(), dtype, requires_grad=gradient)
    cases = [case for case in cases_of_samples(samples) if case.ordinary]
    cases.sort(key=lambda case: -sum(t.numel() for t in case.tensors))
    return cases[: limit or None]
