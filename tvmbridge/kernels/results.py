"""Check and copy the results of ATen calls: fresh tensors of the declared shapes and dtypes.

Compiled code relies on the declared type of a result: a smaller tensor would be read past its end.
So each result is checked at each call, which costs a fraction of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.errors import LEAVE_TO_EAGER, UnsupportedOperatorError
from tvmbridge.kernels.allocation import note
from tvmbridge.kernels.dtypes import as_pairs, from_relax_dtype

Tensors = tuple[torch.Tensor, ...]

_ADVICE = (
    "compiled code would read it wrongly. Correct the operator's fake kernel "
    f"(torch.library.register_fake) or its schema, or {LEAVE_TO_EAGER}"
)


def taker_of(content: Mapping[str, Any]) -> Callable[[Any, Tensors], Any]:
    """Return a function that checks what an operator returned, and selects the graph's results.

    The function takes the operator's return value and its operands. It raises an
    UnsupportedOperatorError if the operator violates its schema or its declared results.

    Args:
        content: the spec of the call. ``declared`` has the shapes and dtypes of the results;
            ``promises``, for custom operators alone, is the value of :func:`promises_of`.
    """
    name, places = content["op"], content["results"]
    numbers = [0] if places is None else places
    declared = content.get("declared") or [None] * len(numbers)
    takers = [_taker(name, i, d) for i, d in zip(numbers, declared, strict=True)]
    promises = content.get("promises")

    def take(out: Any, operands: Tensors) -> Any:
        outs = (out,) if places is None else out
        if promises is not None:
            _check_conduct(name, len(promises), outs, operands)
        taken = tuple(t(outs[i], operands) for t, i in zip(takers, numbers, strict=True))
        if promises is not None:
            _check_strides(name, promises, outs, numbers)
        return taken[0] if places is None else taken

    return take


def _taker(name: str, number: int, declared: Any) -> Callable[[Any, Tensors], torch.Tensor]:
    if declared is None:
        return own
    shape, dtype = torch.Size(declared[0]), from_relax_dtype(declared[1])

    def take(result: Any, operands: Tensors) -> torch.Tensor:
        if not isinstance(result, torch.Tensor) or not _is_with(result, operands):
            found = f"{type(result).__name__}, which is no tensor in the memory of its operands,"
        elif result.shape == shape and result.dtype is dtype:
            return own(result, operands)
        elif result.is_complex() and (pairs := as_pairs(result)).shape == shape:
            if pairs.dtype is dtype:
                return own(pairs, operands)
            found = _type(result.shape, result.dtype)
        else:
            found = f"{_type(result.shape, result.dtype)}"
        raise UnsupportedOperatorError(
            f"{name} returned {found} as result {number}, where {_type(shape, dtype)} was "
            f"declared: {_ADVICE}"
        )

    return take


def _is_with(result: torch.Tensor, operands: Tensors) -> bool:
    """Whether a result is on the operands' device; without operands, on the CPU or a GPU."""
    return result.device == operands[0].device if operands else result.is_cpu or result.is_cuda


def _type(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def own(result: torch.Tensor, operands: Tensors) -> torch.Tensor:
    """Return the result as a dense, aligned tensor that shares no memory with the operands.

    Memory planning assumes that results are fresh. A result that meets this is not copied.
    """
    fresh = _fresh(as_pairs(result), operands)
    return note(fresh) if fresh.is_cuda else fresh


def _fresh(result: torch.Tensor, operands: Tensors) -> torch.Tensor:
    if not result.numel():  # PyTorch calls any strides contiguous here; compiled code does not.
        return torch.empty(result.shape, dtype=result.dtype, device=result.device)
    result = result.contiguous()
    if result.is_neg():  # DLPack cannot represent the negative bit.
        return result.resolve_neg()
    if result._is_zerotensor():  # A zero tensor has no memory.
        return torch.zeros_like(result)
    storage = result.untyped_storage().data_ptr()
    if any(t.untyped_storage().data_ptr() == storage for t in operands):
        return result.clone()
    if result.data_ptr() % 64:
        return result.clone()
    return result


def promises_of(
    operands: Sequence[torch.Tensor], results: torch.Tensor | Sequence[torch.Tensor | None]
) -> list[list[int] | None]:
    """Return the strides of each result that the fake kernel of a custom operator declares.

    If an operand is not contiguous, each entry is None: results may follow the operands' strides,
    and compiled code passes dense operands.
    """
    fakes = [results] if isinstance(results, torch.Tensor) else results
    dense = all(t.is_contiguous() for t in operands)
    return [_strides(f) if dense and f is not None else None for f in fakes]


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides, with 0 for dimensions whose stride has no effect (one element, empty)."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [step if size > 1 and tensor.numel() else 0 for size, step in pairs]


def _check_conduct(name: str, count: int, outs: Sequence[Any], operands: Tensors) -> None:
    # Tensors imported by DLPack begin at version zero, so any other version is a write.
    if any(t._version for t in operands):
        raise UnsupportedOperatorError(
            f"{name} wrote into an argument, which its schema does not say: {_ADVICE}"
        )
    if len(outs) != count:
        raise UnsupportedOperatorError(
            f"{name} returned {len(outs)} results, where {count} were declared: {_ADVICE}"
        )


def _check_strides(
    name: str, declared: Sequence[Any], outs: Sequence[torch.Tensor], numbers: Sequence[int]
) -> None:
    for number in numbers:
        if declared[number] not in (None, _strides(outs[number])):
            raise UnsupportedOperatorError(
                f"{name} returned strides {list(outs[number].stride())} for result {number}, where "
                f"others were declared: {_ADVICE}"
            )
