"""Trace linear algebra that raises for some values, such as the inverse of a singular matrix.

``torch.linalg.inv`` is ``inv_ex`` and a check of its ``info``. To a trace this check is a side
effect. Here it becomes a custom operator that returns the result of ``inv_ex``, and raises
PyTorch's error if the check fails.

Determinants are computed from a contiguous copy. PyTorch's kernel factors a matrix or its
transpose, depending on strides, and the gradient formula reads the strides of the trace to know
which. In compiled code all matrices are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tvmbridge.core.custom_operator import NAMESPACE, CustomOperator, register
from tvmbridge.core.torch_private import linalg_check_errors
from tvmbridge.graph_capture.trace.autocast_lists import cast_to_float32
from tvmbridge.graph_capture.trace.function_table import Call, replaces


def _checked(
    result: torch.Tensor, failed: torch.Tensor, name: str, is_matrix: bool
) -> torch.Tensor:
    linalg_check_errors(failed, name, is_matrix=is_matrix)
    return result.clone()


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
register(
    _LIBRARY,
    CustomOperator(
        "linalg_checked",
        "Tensor result, Tensor failed, str name, bool is_matrix",
        _checked,
        lambda result, **_: torch.empty_like(result),
    ),
)


def _inverse(A: torch.Tensor) -> torch.Tensor:
    result, failed = torch.linalg.inv_ex(A)
    return _passed(result, failed, "linalg.inv", A)


def _solved(A: torch.Tensor, B: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    result, failed = torch.linalg.solve_ex(A, B, left=left)
    return _passed(result, failed, "torch.linalg.solve", A)


def _cholesky(A: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    result, failed = torch.linalg.cholesky_ex(A, upper=upper)
    return _passed(result, failed, "linalg.cholesky", A)


def _lu_factor(A: torch.Tensor, *, pivot: bool = True) -> Any:
    result, pivots, failed = torch.linalg.lu_factor_ex(A, pivot=pivot)
    passed = [_passed(each, failed, "torch.linalg.lu_factor", A) for each in (result, pivots)]
    return torch.return_types.linalg_lu_factor(passed)  # type: ignore[attr-defined]


def _ldl_factor(A: torch.Tensor, *, hermitian: bool = False) -> Any:
    result, pivots, failed = torch.linalg.ldl_factor_ex(A, hermitian=hermitian)
    passed = [_passed(each, failed, "torch.linalg.ldl_factor", A) for each in (result, pivots)]
    return torch.return_types.linalg_ldl_factor(passed)  # type: ignore[attr-defined]


def _power(A: torch.Tensor, n: int) -> torch.Tensor:
    if n >= 0:
        return torch.linalg.matrix_power(A, n)
    return torch.linalg.matrix_power(_inverse(A), -n)


def _of_dense(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda A: function(A.contiguous())


def _passed(result: torch.Tensor, failed: torch.Tensor, name: str, A: torch.Tensor) -> torch.Tensor:
    passed: torch.Tensor = torch.ops.tvmbridge.linalg_checked(result, failed, name, A.dim() == 2)
    return passed


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.linalg.inv: _inverse,
    torch.inverse: _inverse,
    torch.Tensor.inverse: _inverse,
    torch.linalg.solve: _solved,
    torch.linalg.cholesky: _cholesky,
    torch.linalg.lu_factor: _lu_factor,
    torch.linalg.ldl_factor: _ldl_factor,
    torch.linalg.matrix_power: _power,
    torch.matrix_power: _power,
    torch.Tensor.matrix_power: _power,
    **{
        function: _of_dense(function)
        for owner in (torch, torch.Tensor, torch.linalg)
        for name in ("det", "slogdet", "logdet")
        if (function := getattr(owner, name, None)) is not None
    },
}


@replaces(*_FUNCTIONS)
def _made_of_parts(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs:
        return call(*args, **kwargs)
    named = {"A" if name == "input" else name: value for name, value in kwargs.items()}
    args, named = cast_to_float32(call.function.__name__, args, named)
    return _FUNCTIONS[call.function](*args, **named)
