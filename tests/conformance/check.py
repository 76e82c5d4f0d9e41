"""One group of cases: compiled as one module, run, and compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import tvmbridge
from tests.conformance.samples import Case
from tvmbridge.errors import BridgeError, BuildError, PassError


@dataclass
class Outcome:
    """What came of one case: a class, and the reason where it is not a good one."""

    label: str
    result: str
    reason: str = ""
    ordinary: bool = True
    native: list[str] = field(default_factory=list)
    aten: list[str] = field(default_factory=list)


class GroupFailed(Exception):
    """A group of several cases did not get through; its cases must go one by one."""


class Calls(nn.Module):
    """Several calls of one operator as a module whose inputs are all their tensors."""

    def __init__(self, operator: Callable[..., Any], cases: Sequence[Case]) -> None:
        super().__init__()
        self.operator = operator
        self.cases = list(cases)

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        results, position = [], 0
        for case in self.cases:
            count = len(case.tensors)
            args, kwargs = case.arguments(tensors[position : position + count])
            results.append(self.operator(*args, **kwargs))
            position += count
        return results


def eager(operator: Callable[..., Any], case: Case) -> Any:
    """The result of PyTorch itself, seeded; raises what the operator raises."""
    args, kwargs = case.arguments([_copy(t) for t in case.tensors])
    torch.manual_seed(0)
    with torch.no_grad():
        return operator(*args, **kwargs)


def check_group(
    operator: Callable[..., Any], cases: Sequence[Case], *, compare_values: bool
) -> list[Outcome]:
    """The outcomes of ``cases``, run as one module.

    Raises:
        GroupFailed: there are several cases and they are not all right.
    """
    alone = len(cases) == 1
    try:
        results, expected, report = _run(operator, cases)
    except Exception as error:
        if not alone:
            raise GroupFailed from error
        return [_failure(cases[0], _class_of(error), _describe(error))]
    if report.fallbacks or report.tvm_calls != 1:
        if not alone:
            raise GroupFailed
        return [_failure(cases[0], "error", f"fell back: {report.fallbacks}")]
    specialization = report.specializations[0]
    native, aten = (
        sorted(calls) for calls in (specialization.native_operators, specialization.aten_operators)
    )
    outcomes = []
    for case, ours, theirs in zip(cases, results, expected, strict=True):
        difference = compare(ours, theirs, values=compare_values)
        if difference and not alone:
            raise GroupFailed
        if difference and _is_no_worse(operator, case, ours, theirs):
            difference = None
        result = "wrong" if difference else _native_class(native, aten)
        reason = difference or ""
        outcomes.append(Outcome(case.label, result, reason, case.ordinary, native, aten))
    return outcomes


def _is_no_worse(operator: Callable[..., Any], case: Case, ours: Any, theirs: Any) -> bool:
    """Whether a result differs by rounding alone: float64 says that it is as near as eager's.

    Eager PyTorch rounds a half-precision result otherwise for other strides of the same values.
    """
    if compare(ours, theirs, values=False):
        return False
    wide = [_copy(t, torch.float64) if t.is_floating_point() else _copy(t) for t in case.tensors]
    args, kwargs = case.arguments(wide)
    try:
        with torch.no_grad():
            reference = operator(*args, **kwargs)
    except Exception:
        return False
    leaves = [pytree.tree_leaves(x) for x in (ours, theirs, reference)]
    return all(_is_as_near(a, b, r) for a, b, r in zip(*leaves, strict=True))


def _is_as_near(ours: Any, theirs: Any, reference: Any) -> bool:
    if not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
        return _compare_leaf(ours, theirs, values=True) is None
    return _error(ours, reference) <= _error(theirs, reference) < float("inf")


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest error; infinite where NaN or an infinity is in another place."""
    if result.shape != reference.shape:
        return float("inf")
    wide, exact = result.double(), reference.double()
    finite = exact.isfinite()
    for test in (torch.isfinite, torch.isnan, torch.isposinf):
        if not torch.equal(test(wide), test(exact)):
            return float("inf")
    errors = (wide[finite] - exact[finite]).abs()
    return float(errors.max()) if errors.numel() else 0.0


def _failure(case: Case, result: str, reason: str) -> Outcome:
    return Outcome(case.label, result, reason, case.ordinary)


def _run(
    operator: Callable[..., Any], cases: Sequence[Case]
) -> tuple[list[Any], list[Any], tvmbridge.DispatchReport]:
    module = Calls(operator, cases).eval()
    inputs = tuple(t for case in cases for t in case.tensors)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = module(*[_copy(t) for t in inputs])
        tvmbridge.add_tvm_dispatch(module, inputs)
        torch.manual_seed(0)
        results = module(*inputs)
    return results, expected, tvmbridge.dispatch_report(module)


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy with the same strides."""
    if 0 in tensor.stride() or not tensor.numel():
        return tensor.clone().to(dtype or tensor.dtype)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype)
    return copy.copy_(tensor)


def _native_class(native: Sequence[str], aten: Sequence[str]) -> str:
    if not aten:
        return "native"
    return "mixed" if native else "aten_call"


def _class_of(error: Exception) -> str:
    refusal = isinstance(error, BridgeError) and not isinstance(error, BuildError | PassError)
    return "refused" if refusal else "error"


def _describe(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text[:600]}"


def compare(ours: Any, theirs: Any, *, values: bool) -> str | None:
    """How two results differ in structure, dtype, shape or values; None when they agree."""
    left, left_spec = pytree.tree_flatten(ours)
    right, right_spec = pytree.tree_flatten(theirs)
    if len(left) != len(right) or str(left_spec) != str(right_spec):
        return f"the structure is {left_spec} instead of {right_spec}"
    for a, b in zip(left, right, strict=True):
        difference = _compare_leaf(a, b, values=values)
        if difference:
            return difference
    return None


def _compare_leaf(ours: Any, theirs: Any, *, values: bool) -> str | None:
    if not isinstance(theirs, torch.Tensor):
        same = ours == theirs or (ours != ours and theirs != theirs)
        return None if same else f"{ours!r} instead of {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"a {type(ours).__name__} instead of a tensor"
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} instead of {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    if not values:
        return None
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:600]
    return None
