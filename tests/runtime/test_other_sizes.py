"""Calls of other sizes are served by symbolic code or run in eager PyTorch; none is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.runtime.size_cases import CASES
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.family import Family


def _exact(given: Any) -> Any:
    return pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, given)


def _step(module: nn.Module, given: tuple[Any, ...], trains: bool) -> tuple[list[Any], list[Any]]:
    """Call the module; return results and buffers, and the gradients if it trains."""
    torch.manual_seed(1)
    with torch.set_grad_enabled(trains):
        results = pytree.tree_leaves(module(*given))
    gradients: list[Any] = []
    if trains:
        total = sum(r.square().sum() for r in results if r.requires_grad)
        gradients += torch.autograd.grad(total, list(module.parameters()))  # type: ignore[arg-type]
    return [*(r.detach() for r in results), *map(torch.clone, module.buffers())], gradients


# Quick tests keep one case of each way in which sizes and code depend on each other.
_SLOW = (
    *("columns of one less", "first rows", "softmax", "grown, declared", "sums", "drawn"),
    *("masked", "differences", "related", "smallest", "classes", "heads", "compared lengths"),
    *("patches", "recurrent", "sliding", "permuted caches", "eight rows", "rows of one more"),
    *("another branch at one left", "one left", "one for all", "two lengths"),
    "the smaller of two sizes",
)


@pytest.mark.parametrize("name", but_slow(CASES, *_SLOW))
def test_results_at_other_sizes_are_those_of_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, compiled, genuine = CASES[name], list[Any](), Family._compile
    monkeypatch.setattr(Family, "_compile", lambda *given: compiled.append(1) or genuine(*given))
    module = case.make().train(case.trains)
    reference = copy.deepcopy(module)
    reference = reference.double() if case.exact else reference

    def arguments(size: tuple[int, ...]) -> tuple[Any, ...]:
        given = case.arguments(*size)
        return given if isinstance(given, tuple) else (given,)

    sample = (arguments(case.sizes[0]),) if case.sampled else ()
    add_tvm_dispatch(module, *sample, dynamic_shapes=case.spec, on_fallback="silent")
    calls = [*case.sizes] * case.rounds
    for size in calls:
        given = arguments(size)
        found = _step(module, given, case.trains)
        expected = _step(reference, _exact(given) if case.exact else given, case.trains)
        for ours, theirs, bound in zip(found, expected, (1e-5, case.bound), strict=True):
            bounds = {"rtol": case.relative, "atol": bound} if case.exact else {}
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine.to(other.dtype), other, **bounds)
    report = dispatch_report(module)
    assert case.unserved in (None, len(calls) - report.tvm_calls), report.fallbacks
    assert case.compilations in (None, len(compiled))
