"""Gradients for which derivative rules are easily wrong, against PyTorch's autograd.

Each case is compiled by the whole pipeline, by both sources of the joint function if both support
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.compare import compare
from tests.conformance.evaluate import Run, Values, run_group
from tests.frontend.helpers import Cases
from tests.gradients import traps, traps_missing
from tvmbridge.core.errors import BridgeError

# Rules that are easily wrong: tested by both sources.
WRONG = {
    "kinks": traps.KINKS,
    "ties": traps.TIED,
    "pools": traps.POOLS,
    "moves": traps.MOVES,
}
# Operators without a rule of TVM: tested by the source that ``auto`` chooses.
MISSING = {
    "functions": traps_missing.FUNCTIONS,
    "shapes": traps_missing.SHAPES,
    "indices": traps_missing.INDICES,
    "stops": traps_missing.STOPS,
}
TABLES: dict[str, Cases] = {**WRONG, **MISSING}
NAMES = [(kind, name) for kind, table in TABLES.items() for name in table]

# Cases for which ``auto`` uses PyTorch's derivatives; TVM's Gradient differentiates the others.
BY_PYTORCH = frozenset(
    {
        "clamp at its bounds",
        "hardtanh at its bounds",
        "leaky relu at 0",
        "elu and softplus",
        "standard deviation of equals",
        "norm of zeros",
        "max and min with indices",
        "max of all",
        "detached factor",
        "take by a 2-d index",
        "rows written",
        "slices with steps, and from behind",
        "padding",
        "cumulative sum and product",
        "product with a zero",
        "rounding",
        "activations",
        "trigonometric",
        "hyperbolic",
        "logarithms",
        "remainders",
        "powers of tensors",
        "slices written",
        "padding by what is there",
        "triangles of matrices in a batch",
        "windows of a signal",
        "an index without dimensions",
        "scattered elements",
        "order",
        "order of equals",
        "bags of embeddings",
        "tests of floats",
        "positions of the largest",
        "whole numbers",
    }
)


def call(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    return function(*inputs)


def case_of(kind: str, name: str, dtype: torch.dtype) -> Case:
    """Return a case with floating-point inputs in ``dtype``, all of them differentiated."""
    function, inputs = TABLES[kind][name]
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
    leaves, spec = pytree.tree_flatten(((function, *tensors), {}))
    return Case(name, tuple(leaves), spec, tuple(t.is_floating_point() for t in tensors))


def sources(kind: str, name: str) -> tuple[str, ...]:
    """Return the joint sources by which a case is compiled; the choice of ``auto`` is first."""
    if name in BY_PYTORCH:
        return ("aot",)
    return ("relax", "aot") if kind in WRONG else ("relax",)


@functools.cache
def together(kind: str, joint: str, at: int, dtype: torch.dtype) -> dict[str, str | None]:
    """Compile all cases of a kind as one module; return each case's difference from eager, or None.

    The dict is empty if the module is refused.

    Args:
        at: the place of ``joint`` among the sources of these cases.
    """
    names = [name for name in TABLES[kind] if sources(kind, name)[at:][:1] == (joint,)]
    cases = [case_of(kind, name, dtype) for name in names]
    try:
        run = run_group(call, cases, joint, admit=False)
    except BridgeError:
        return {}
    return dict(zip(names, differences(run), strict=True))


def differences(run: Run) -> list[str | None]:
    """Return, for each case, how results and gradients differ from eager's; None if they agree."""
    assert not run.report.fallbacks
    pairs = zip(_by_case(run.ours), _by_case(run.theirs), strict=True)
    return [compare(ours, theirs, values=True) for ours, theirs in pairs]


def _by_case(values: Values) -> list[tuple[Any, Any]]:
    assert values.gradients is not None
    return list(zip(values.results, values.gradients, strict=True))


def _runs() -> Iterator[Any]:
    """Yield each case in float64, and kinks and ties in float32 by Relax's rules as well.

    Relax's rules have constants of a dtype, most of them at kinks. Ties in float32 are slow, as is
    the source that ``auto`` does not choose.
    """
    for kind, name in NAMES:
        for at, joint in enumerate(sources(kind, name)):
            marks = [pytest.mark.slow] if at else []
            yield pytest.param(kind, name, joint, torch.float64, marks=marks)
            if kind in ("kinks", "ties") and joint == "relax":
                marks = [pytest.mark.slow] if kind == "ties" else []
                yield pytest.param(kind, name, joint, torch.float32, marks=marks)


@pytest.mark.parametrize(("kind", "name", "joint", "dtype"), list(_runs()))
def test_gradient_is_pytorchs(kind: str, name: str, joint: str, dtype: torch.dtype) -> None:
    found = together(kind, joint, sources(kind, name).index(joint), dtype)
    if name in found:
        assert found[name] is None, found[name]
        return
    (difference,) = differences(run_group(call, [case_of(kind, name, dtype)], joint, admit=False))
    assert difference is None, difference
    raise AssertionError("it is right by itself, but not compiled with the others")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_the_source_is_known(kind: str, name: str) -> None:
    """Check that ``auto`` chooses the expected source for each case compiled separately."""
    run = run_group(call, [case_of(kind, name, torch.float64)], "auto", admit=False)
    assert differences(run) == [None]
    (specialization,) = run.report.specializations
    assert specialization.joint == sources(kind, name)[0]
