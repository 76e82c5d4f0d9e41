"""EliminateCommonSubexpr: at several sizes the same expressions are merged."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import build_main, operators
from tvmbridge.core.decisions import recorded_decisions, repeated_decisions
from tvmbridge.core.errors import BuildError
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.eliminate_common_subexpr import EliminateCommonSubexpr


def _two_ranges(rows: int, classes: int) -> tvm.IRModule:
    """Zeros for the rows, zeros for the classes, and those for the rows again."""

    def results(x: relax.Expr) -> list[relax.Expr]:
        return [op.exp(op.zeros((n,), "float32")) for n in (rows, classes, rows)] + [op.exp(x)]

    return build_main([torch.zeros(rows)], results)


def _merged(mod: tvm.IRModule) -> tvm.IRModule:
    canonical = relax.transform.CanonicalizeBindings()
    return DeadCodeElimination()(canonical(EliminateCommonSubexpr()(canonical(mod))))


def test_one_size_merges_all_that_is_equal() -> None:
    assert len(operators(_merged(_two_ranges(3, 3)))) == 3
    assert len(operators(_merged(_two_ranges(5, 3)))) == 5


def test_an_expression_equal_at_one_of_the_sizes_stays() -> None:
    with recorded_decisions() as decisions:
        first = operators(_merged(_two_ranges(5, 3)))
    with repeated_decisions(decisions):
        other = _merged(_two_ranges(3, 3))
    assert operators(other) == first
    relax.analysis.well_formed(other)


def test_expressions_equal_at_the_first_size_alone_are_refused() -> None:
    with recorded_decisions() as decisions:
        _merged(_two_ranges(3, 3))
    with pytest.raises(BuildError, match="equal expressions differ"), repeated_decisions(decisions):
        _merged(_two_ranges(5, 3))
