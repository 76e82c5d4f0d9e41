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
from tests.gradients import traps, traps_missing, traps_right
from tvmbridge.core.errors import BridgeError

# Rules that are easily wrong: tested by both sources, in quick tests too.
WRONG = {
    "kinks": traps.KINKS,
    "ties": traps.TIED,
    "pools": traps.POOLS,
    "moves": traps.MOVES,
}
# Operators without a rule of TVM: quick tests use only the source that ``auto`` chooses.
MISSING = {
    "functions": traps_missing.FUNCTIONS,
    "shapes": traps_missing.SHAPES,
    "indices": traps_missing.INDICES,
    "stops": traps_missing.STOPS,
}
# Cases that other tests cover as well: slow tests only.
SEEN = {
    "layers": traps_missing.LAYERS,
    "products": traps_right.PRODUCTS,
    "reductions": traps_right.REDUCTIONS,
}
TABLES: dict[str, Cases] = {**WRONG, **MISSING, **SEEN}
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
        "pools",
        "grid_sample",
        "matmul of vectors and matrices",
        "matmul of batches",
        "matmul of batches that broadcast",
        "products with sums",
        "losses of classes",
        "sums and means",
        "variances",
        "losses of values",
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


def sources(name: str) -> tuple[str, ...]:
    """Return the joint sources that support a case; the choice of ``auto`` is first."""
    return ("aot",) if name in BY_PYTORCH else ("relax", "aot")


def when_asked(kind: str, name: str, joint: str) -> bool:
    """Whether only the slow tests run a case."""
    return kind in SEEN or (kind in MISSING and joint != sources(name)[0])


@functools.cache
def together(kind: str, joint: str, dtype: torch.dtype, slow: bool) -> dict[str, str | None]:
    """Compile all cases of a kind as one module; return each case's difference from eager, or None.

    The dict is empty if the module is refused.
    """
    names = [n for n in TABLES[kind] if joint in sources(n) and when_asked(kind, n, joint) == slow]
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
    """Yield each case by both sources in float64, and kinks and ties in float32 as well.

    In float32, quick tests use only Relax's rules, which have constants of a dtype.
    """
    for kind, name in NAMES:
        for joint in sources(name):
            marks = [pytest.mark.slow] if when_asked(kind, name, joint) else []
            yield pytest.param(kind, name, joint, torch.float64, marks=marks)
            if kind in ("kinks", "ties"):
                marks = [] if joint == "relax" else [pytest.mark.slow]
                yield pytest.param(kind, name, joint, torch.float32, marks=marks)


@pytest.mark.parametrize(("kind", "name", "joint", "dtype"), list(_runs()))
def test_gradient_is_pytorchs(kind: str, name: str, joint: str, dtype: torch.dtype) -> None:
    found = together(kind, joint, dtype, when_asked(kind, name, joint))
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
    assert specialization.joint == sources(name)[0]
