"""Each admitted gradient rule against PyTorch's autograd in float64, in all forms that occur."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import tvm
from tvm import relax

from tests.gradients.cases import Case, normal
from tests.gradients.cases_elementwise import elementwise_cases
from tests.gradients.cases_moves import move_cases
from tests.gradients.cases_reductions import reduction_and_product_cases
from tests.gradients.cases_shapes import shape_cases
from tests.gradients.cases_windows import window_cases
from tests.relax_helpers import CompiledFunctions, build_main
from tests.thinned import but_slow
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.differentiation.differentiate import differentiate, missing_rules
from tvmbridge.gradients import CLAIMED, rule_name

op = relax.op

CASES = (
    *elementwise_cases(),
    *shape_cases(),
    *reduction_and_product_cases(),
    *window_cases(),
    *move_cases(),
)
BY_NAME = {str(case): case for case in CASES}


def forward_of(case: Case) -> tvm.IRModule:
    """Return the Relax module of the case's formula."""
    return build_main(case.inputs, case.relax)


def joint_of(case: Case) -> relax.Function:
    """Return the joint function of a case: inputs and cotangents to results and gradients."""
    mod = forward_of(case)
    wanted = [f"x{i}" for i, t in enumerate(case.inputs) if t.is_floating_point()]
    count = len(as_list(case.torch(*case.inputs)))
    return differentiate(mod, wanted, range(count), []).mod["joint"]


def rule_names(mod: tvm.IRModule) -> set[str]:
    """Return the names by which rules of the calls in ``main`` are registered."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return {rule_name(b.value) for b in bindings if isinstance(b.value, relax.Call)}


def as_list(results: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def test_every_admitted_rule_has_a_case() -> None:
    assert {c.rule for c in CASES} == set(CLAIMED)


def test_cases_have_names_of_their_own() -> None:
    names = [str(c) for c in CASES]
    assert len(names) == len(set(names))


# Quick tests keep the first case of each rule.
FIRST = {case.rule: str(case) for case in reversed(CASES)}.values()


@pytest.mark.parametrize("name", but_slow(BY_NAME, *(n for n in BY_NAME if n not in FIRST)))
def test_agrees_with_autograd(name: str) -> None:
    case = BY_NAME[name]
    assert case.rule in rule_names(forward_of(case)), "the case does not hold its operator"
    run = CompiledFunctions(tvm.IRModule({"joint": joint_of(case)}))
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in case.inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = as_list(case.torch(*leaves))
    cotangents = [normal(*o.shape, seed=5 + i).to(o.dtype) for i, o in enumerate(outputs)]
    expected = torch.autograd.grad(
        outputs, wanted, cotangents, allow_unused=True, materialize_grads=True
    )
    results = run("joint", *case.inputs, *cotangents)
    assert len(results) == len(outputs) + len(expected)
    for got, want in zip(results, [*outputs, *expected], strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)


def refused(formula: object, *inputs: torch.Tensor) -> str:
    """Return the message of the error that refuses the formula's gradient."""
    mod = build_main(inputs, formula)
    wanted = [f"x{i}" for i, t in enumerate(inputs) if t.is_floating_point()]
    assert missing_rules(mod, wanted)
    with pytest.raises(UnsupportedOperatorError) as caught:
        differentiate(mod, wanted, [0], [])
    return str(caught.value)


def test_slices_with_steps_are_refused() -> None:
    message = refused(lambda x: op.strided_slice(x, [0], [0], [7], [2]), normal(7))
    assert "relax.strided_slice" in message


def test_look_ups_by_other_than_a_row_of_indices_are_refused() -> None:
    indices = torch.zeros(2, 2, dtype=torch.int64)
    assert "relax.take" in refused(lambda x, i: op.take(x, i, axis=0), normal(3, 4), indices)
    assert "relax.take" in refused(lambda x, i: op.take(x, i, axis=0), normal(3), indices[0, 0])


def test_a_fill_that_is_computed_is_refused() -> None:
    message = refused(lambda x: op.full((3,), x, "float64"), normal())
    assert "relax.full" in message
