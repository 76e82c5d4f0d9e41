"""Trace functions with data-dependent control flow as opaque custom operators.

``torch.cov`` checks whether its weights sum to zero, ``gaussian_nll_loss`` whether a variance is
negative, ``one_hot`` whether each class exists. A trace cannot contain such a check. Each function
becomes one custom operator that calls the eager function, and so raises the same errors. Autograd
computes its gradient. The output shapes of all functions here follow from their input shapes.

``grouped_mm`` becomes such an operator for all dtypes but bfloat16, the only dtype that PyTorch can
trace it for.

``prod`` and ``cumprod`` are here because of their gradient. PyTorch's formula branches on zeros,
and takes another branch for fake tensors. The results differ if a row has both zeros and NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from tvmbridge.core.custom_operator import NAMESPACE, CustomOperator, register
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import assert_async, grouped_mm
from tvmbridge.graph_capture.trace.autocast_lists import cast_to_float32
from tvmbridge.graph_capture.trace.function_table import Call, replaces


def _quantile(
    input: torch.Tensor, q: Any, dim: int | None = None, keepdim: bool = False, **_: Any
) -> torch.Tensor:
    if dim is None:
        kept = [1] * input.dim() if keepdim else []
    else:
        kept = list(input.shape)
        if kept:
            kept[dim : dim + 1 or None] = [1] if keepdim else []
    several = list(q.shape) if isinstance(q, torch.Tensor) else []
    return input.new_empty([*several, *kept])


def _covariance(
    input: torch.Tensor, aweights: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    variables = 1 if input.dim() < 2 else input.shape[0]
    dtype = input.dtype if input.is_floating_point() else torch.get_default_dtype()
    if aweights is not None:
        dtype = torch.promote_types(dtype, aweights.dtype)
    return input.new_empty([] if variables == 1 else [variables, variables], dtype=dtype)


def _combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    count = input.shape[0] + r - 1 if with_replacement and r else input.shape[0]
    rows = math.prod(count - i for i in range(r)) // math.factorial(r)
    return input.new_empty([rows, r] if r else [0])


def _ctc_loss(log_probs: torch.Tensor, reduction: str = "mean", **_: Any) -> torch.Tensor:
    batch = log_probs.shape[1:-1]
    return log_probs.new_empty(batch if reduction == "none" else [])


def _gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, reduction: str = "mean", **_: Any
) -> torch.Tensor:
    operands = [input, target]
    if isinstance(var, torch.Tensor):
        per_row = var.dim() and var.shape != input.shape and var.shape == input.shape[:-1]
        operands.append(var.unsqueeze(-1) if per_row else var)
    total = sum(o.new_empty(o.shape) for o in operands) * 1.0
    assert isinstance(total, torch.Tensor)
    return total.new_empty(total.shape if reduction == "none" else [])


def _product(
    input: torch.Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if dim is None:
        return torch.prod(input, dtype=dtype)
    return torch.prod(input, dim, keepdim, dtype=dtype)


def _put_by_mask(
    input: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    return torch.index_put(input, (mask,), values, accumulate)


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    return input.new_empty([*input.shape, num_classes])


def _istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    center: bool = True,
    length: int | None = None,
    return_complex: bool = False,
    **_: Any,
) -> torch.Tensor:
    if length is None:
        hop = n_fft // 4 if hop_length is None else hop_length
        length = n_fft + hop * (input.shape[-1] - 1) - (n_fft // 2 * 2 if center else 0)
    dtype = input.dtype if return_complex else input.dtype.to_real()
    return input.new_empty([*input.shape[:-2], length], dtype=dtype)


def _grouped(mat_a: torch.Tensor, mat_b: torch.Tensor, **named: Any) -> torch.Tensor:
    result: torch.Tensor = grouped_mm(mat_a, mat_b, **named)
    return result.contiguous()


def _grouped_result(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return an empty result of ``grouped_mm``.

    It has one matrix for each group if both operands have three dimensions, or if both have two
    and their common dimension is in groups.
    """
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    groups = [] if offs is None else [len(offs)] if mat_a.dim() == mat_b.dim() else []
    if mat_a.dim() == 3 and mat_b.dim() == 3:
        groups = [len(mat_a)]
    return mat_a.new_empty([*groups, rows, columns], dtype=out_dtype or mat_a.dtype)


_QUANTILE = "int? dim=None, bool keepdim=False, str interpolation='linear'"
_CTC = "int blank=0, str reduction='mean', bool zero_infinity=False"
_FRAMES = "int? hop_length=None, int? win_length=None, Tensor? window=None, bool center=True"
_ISTFT = "bool normalized=False, bool? onesided=None, int? length=None, bool return_complex=False"
_NLL = "bool full=False, float eps=1e-06, str reduction='mean'"


def _quantiles(function: Any) -> tuple[CustomOperator, CustomOperator]:
    """Return two operators for a quantile function: for ``q`` as a tensor and as a number."""
    name = function.__name__
    by_tensor = CustomOperator(
        name,
        f"Tensor input, Tensor q, {_QUANTILE}",
        function,
        _quantile,
        (function, getattr(torch.Tensor, name)),
    )
    schema = f"Tensor input, float q, {_QUANTILE}"
    return by_tensor, CustomOperator(f"{name}.scalar", schema, function, _quantile)


_FUNCTIONS = (
    *_quantiles(torch.quantile),
    *_quantiles(torch.nanquantile),
    CustomOperator(
        "cov",
        "Tensor input, int correction=1, Tensor? fweights=None, Tensor? aweights=None",
        torch.cov,
        _covariance,
        (torch.cov, torch.Tensor.cov),
    ),
    CustomOperator(
        "corrcoef",
        "Tensor input",
        torch.corrcoef,
        _covariance,
        (torch.corrcoef, torch.Tensor.corrcoef),
    ),
    CustomOperator(
        "combinations",
        "Tensor input, int r=2, bool with_replacement=False",
        torch.combinations,
        _combinations,
        (torch.combinations,),
    ),
    CustomOperator(
        "ctc_loss",
        f"Tensor log_probs, Tensor targets, int[] input_lengths, int[] target_lengths, {_CTC}",
        functional.ctc_loss,
        _ctc_loss,
        (functional.ctc_loss,),
    ),
    CustomOperator(
        "ctc_loss.Tensor",
        f"Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, {_CTC}",
        functional.ctc_loss,
        _ctc_loss,
    ),
    CustomOperator(
        "gaussian_nll_loss",
        f"Tensor input, Tensor target, Tensor var, {_NLL}",
        functional.gaussian_nll_loss,
        _gaussian_nll_loss,
        (functional.gaussian_nll_loss,),
    ),
    CustomOperator(
        "gaussian_nll_loss.scalar",
        f"Tensor input, Tensor target, float var, {_NLL}",
        functional.gaussian_nll_loss,
        _gaussian_nll_loss,
    ),
    CustomOperator(
        "prod",
        "Tensor input, int? dim=None, bool keepdim=False, ScalarType? dtype=None",
        _product,
        _product,
        (torch.prod, torch.Tensor.prod),
    ),
    CustomOperator(
        "cumprod",
        "Tensor input, int dim, ScalarType? dtype=None",
        torch.cumprod,
        torch.cumprod,
        (torch.cumprod, torch.Tensor.cumprod),
    ),
    CustomOperator(
        "istft",
        f"Tensor input, int n_fft, {_FRAMES}, {_ISTFT}",
        torch.istft,
        _istft,
        (torch.istft, torch.Tensor.istft),
    ),
    CustomOperator(
        "one_hot",
        "Tensor input, int num_classes",
        functional.one_hot,
        _one_hot,
        (functional.one_hot,),
    ),
    CustomOperator(
        "grouped_mm",
        "Tensor mat_a, Tensor mat_b, Tensor? offs=None, Tensor? bias=None, "
        "ScalarType? out_dtype=None",
        _grouped,
        _grouped_result,
        (grouped_mm,),
    ),
    CustomOperator(
        "put_by_mask",
        "Tensor input, Tensor mask, Tensor values, bool accumulate=False",
        _put_by_mask,
        lambda input, **_: input.new_empty(input.shape),
    ),
)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
for _whole in _FUNCTIONS:
    register(_LIBRARY, _whole)

_OPERATORS: dict[Any, Any] = {
    spelling: getattr(torch.ops.tvmbridge, whole.name)
    for whole in _FUNCTIONS
    for spelling in whole.spellings
}


_QUANTILES = (torch.quantile, torch.Tensor.quantile, torch.nanquantile, torch.Tensor.nanquantile)
_ASSERTIONS = (
    assert_async,  # in a call form or under a name that ``validation.py`` does not record
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
)
_OVERLOADS = {"ctc_loss": "ctc_loss.IntList"}  # The other functions have a default overload.
_PRODUCTS = (torch.prod, torch.Tensor.prod, torch.cumprod, torch.Tensor.cumprod)


@replaces(*_ASSERTIONS)
def _asserted(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperatorError(
        f"forward asserts something of values ({call.function}), which compiled code would not"
    )


@replaces(torch.Tensor.cumprod_)
def _cumprod_in_place(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _by_gradient(*args, **kwargs):
        return call(*args, **kwargs)
    # A clone, because the gradient reads the operand, which is written next.
    product = torch.ops.tvmbridge.cumprod(args[0].clone(), *args[1:], **kwargs)
    return args[0].copy_(product)


@replaces(*_OPERATORS)
def _opaque(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (
        "out" in kwargs
        or (call.function in _QUANTILES and _by_learned(*args, **kwargs))
        or (call.function is functional.one_hot and not _with_classes(*args, **kwargs))
        or (call.function in _PRODUCTS and not _by_gradient(*args, **kwargs))
        or (call.function is grouped_mm and not _in_groups(*args, **kwargs))
    ):
        return call(*args, **kwargs)
    name = call.function.__name__
    args, kwargs = cast_to_float32(_OVERLOADS.get(name, name), args, kwargs)
    return _OPERATORS[call.function](*args, **kwargs)


def _by_learned(input: torch.Tensor, q: Any, *_: Any, **__: Any) -> bool:
    """Whether ``q`` requires a gradient, which some interpolations do not compute."""
    return isinstance(q, torch.Tensor) and q.requires_grad


def _in_groups(mat_a: torch.Tensor, mat_b: torch.Tensor, **_: Any) -> bool:
    """Whether ``grouped_mm`` becomes an operator: no bfloat16, and rows of multiples of 16 bytes.

    PyTorch's kernel takes contiguous operands only if their rows have such a length.
    """
    widths = (mat_b.shape[-1], mat_a.shape[-1])
    aligned = all(width * mat_b.dtype.itemsize % 16 == 0 for width in widths)
    return aligned and mat_a.dtype is not torch.bfloat16


def _with_classes(input: torch.Tensor, num_classes: int = -1) -> bool:
    """Whether the number of classes is given, so that the output shape is known."""
    return num_classes > 0


def _by_gradient(input: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Whether autograd records the call; if not, the ATen operator can be traced."""
    return torch.is_grad_enabled() and input.requires_grad
