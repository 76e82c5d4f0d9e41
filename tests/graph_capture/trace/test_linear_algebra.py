"""Linear algebra that raises for some values: results, gradients and errors equal eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frontend.helpers import Function
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report

linalg = torch.linalg
# Functions of a positive definite matrix.
FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "inv": linalg.inv,
    "inverse": torch.Tensor.inverse,
    "inverse by name": lambda a: torch.inverse(input=a),
    "solve": lambda a: linalg.solve(a, a[..., :2] * 2),
    "solve from the right": lambda a: linalg.solve(a, a[..., 1:, :], left=False),
    "cholesky": linalg.cholesky,
    "cholesky, upper": lambda a: linalg.cholesky(a, upper=True),
    "lu_factor": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a[..., :1]),
    "negative power": lambda a: linalg.matrix_power(a, -2),
    "power": lambda a: torch.matrix_power(a, 3),
}


def _all(*matrices: torch.Tensor) -> list[Any]:
    return [f(a) for f, a in zip(FUNCTIONS.values(), matrices, strict=True)]


def _positive(*batch: int) -> torch.Tensor:
    rows = torch.randn(*batch, 3, 3, dtype=torch.float64)
    return rows @ rows.mT + torch.eye(3, dtype=torch.float64)


def test_results_gradients_and_errors_are_those_of_eager_pytorch() -> None:
    plain = Function(_all)
    module = copy.deepcopy(plain)
    # The error messages differ between single matrices and batches.
    batches: list[tuple[int, ...]] = [() if i % 3 else (2,) for i in range(len(FUNCTIONS))]
    sample = tuple(_positive(*batch).requires_grad_() for batch in batches)
    add_tvm_dispatch(module, sample)
    leaves = [_positive(*batch).requires_grad_() for batch in batches]
    found = []
    for called in (module, plain):
        results = called(*leaves)
        total = sum((r.sin() * (i + 1)).sum() for i, r in enumerate(results))
        assert isinstance(total, torch.Tensor)
        found.append([*results, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*found)
    for number, name in enumerate(FUNCTIONS):
        bad = [leaf.detach().requires_grad_() for leaf in leaves]
        bad[number] = torch.zeros_like(leaves[number]).requires_grad_()
        if name == "power":
            torch.testing.assert_close(module(*bad), plain(*bad))
            continue
        with pytest.raises(RuntimeError) as expected:
            plain(*bad)
        with pytest.raises(type(expected.value)) as raised:
            module(*bad)
        assert str(expected.value) in str(raised.value)
    assert dispatch_report(module).tvm_calls == 2  # calls that raise are not counted
    assert not dispatch_report(module).fallbacks


def _determinants(*matrices: torch.Tensor) -> list[Any]:
    functions = (
        torch.det,
        lambda a: torch.linalg.det(A=a),
        torch.Tensor.logdet,
        lambda a: torch.slogdet(input=a)[1],
        lambda a: linalg.slogdet(a).logabsdet,
    )
    return [f(a) for f, a in zip(functions, matrices, strict=True)]


@pytest.mark.parametrize("by_columns", thinned([True, False], 2))
def test_gradients_of_determinants_do_not_depend_on_how_a_matrix_lies(by_columns: bool) -> None:
    module = Function(_determinants)
    given = []
    for batch in ((), (2,), (), (), (2,)):
        lower = torch.randn(*batch, 3, 3, dtype=torch.float64).tril(-1)
        # The matrix has the determinant 8, and is not symmetric.
        matrix = lower + 2 * torch.eye(3, dtype=torch.float64)
        lies = matrix.mT.contiguous().mT if by_columns else matrix
        given.append(lies.requires_grad_())
    add_tvm_dispatch(module, tuple(given))
    total = sum((r * (i + 1)).sum() for i, r in enumerate(module(*given)))
    found = torch.autograd.grad(total, given)
    assert dispatch_report(module).fallbacks == {}
    for number, (gradient, matrix) in enumerate(zip(found, given, strict=True)):
        # The gradient of log|det A| is the transposed inverse of A; for det A, times det A.
        expected = (number + 1) * (8 if number < 2 else 1) * linalg.inv(matrix.detach()).mT
        torch.testing.assert_close(gradient, expected)
