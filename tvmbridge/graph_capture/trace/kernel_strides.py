"""Give fake results the strides of PyTorch's real kernels, if its fake kernels differ.

Strides decide whether ``reshape`` or ``contiguous()`` is a view. With wrong strides, a mutation
would reach an alias in the trace alone, or in eager PyTorch alone. Forward may also read strides,
and ``as_strided`` reads memory by them.

No table of rules would be complete. So the real kernel runs once on zeros with the sizes and
strides of the operands, and the fake results get its strides. It does not run if all operands and
results are contiguous, except for a few operators and whole functions of PyTorch, nor for matrix
products, whose results always are contiguous.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.custom_operator import is_function
from tvmbridge.core.set_within import set_within
from tvmbridge.core.symbolic_numbers import SYMBOLIC
from tvmbridge.core.torch_private import (
    DisablePythonDispatcher,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    disable_current_modes,
    make_contiguous_strides_for,
    meta_registrations,
    pytree,
    storage_key,
)
from tvmbridge.graph_capture.trace.fake_results import results_shared

logger = logging.getLogger(__name__)
aten = torch.ops.aten

# The strides of each result; None for a result that is no tensor.
_Strides: TypeAlias = tuple[tuple[int, ...] | None, ...]

# Matrix products take long, and their results are always contiguous. ``as_strided`` is given its
# strides. For a dimension of stride 0, the kernels of medians read past the end of the memory.
_NEVER_ASKED = frozenset(
    {
        "aten::addmm",
        "aten::addmv",
        "aten::as_strided",
        "aten::baddbmm",
        "aten::bmm",
        "aten::dot",
        "aten::median",
        "aten::mm",
        "aten::mv",
        "aten::nanmedian",
    }
)
# Their kernels return results in another order of memory than that of contiguous operands, and the
# fake kernels of PyTorch 2.11 do not say so.
_TRANSPOSE_DENSE = frozenset({"aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c"})
# For more elements in all operands and results, kernels do not run: their zeros might not fit.
# Operators that return views then run on the meta device, which gives tensors no memory.
_MOST_ELEMENTS = 2**27
_MOST_KNOWN = 2**14

_known: dict[Any, _Strides | None] = {}
# The operators of the trace whose kernels could not run, or were not run because of their size.
_unanswered: ContextVar[dict[str, None] | None] = ContextVar("_unanswered", default=None)


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Give the results of fake kernels the strides of real kernels within the context.

    Results with these strides are shared by the traces in such a context. Sizes of a pool's results
    are computed without a branch: PyTorch 2.11 branches by a remainder, so that code would serve
    sizes of one remainder alone.
    """
    with (
        set_within(_unanswered, {}),
        patched_here(FakeTensorMode, "dispatch", _dispatched),
        results_shared(),
        patched_here(meta_registrations(), "div_rtn", _floor_divided),
    ):
        yield


def _floor_divided(_genuine: Callable[..., Any], dividend: Any, divisor: Any) -> Any:
    return dividend // divisor


def unanswered() -> tuple[str, ...]:
    """Return the operators of the trace so far whose strides could not be verified."""
    return tuple(_unanswered.get() or ())


def _dispatched(
    genuine: Callable[..., Any],
    mode: FakeTensorMode,
    func: Any,
    types: Any,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    if _takes_out(func):
        return _written(genuine, mode, func, types, args, kwargs or {})
    results = genuine(mode, func, types, args, kwargs or {})
    if not _may_be_asked(func):
        return results
    given, structure = pytree.tree_flatten((args, kwargs or {}))
    made, structure_of_results = pytree.tree_flatten(results)
    operands = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    tensors = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
    if not operands or not tensors or not _may_differ(func, operands, tensors):
        return results
    if any(isinstance(leaf, SYMBOLIC) for leaf in given):
        return results
    if _draws(func) and not all(tensor.is_cpu for tensor in (*operands, *tensors)):
        return results
    fits = sum(t.numel() for t in (*operands, *tensors)) <= _MOST_ELEMENTS
    strides = _strides_of(func, given, structure, made, fits) if fits or func.is_view else None
    if strides is None:
        _note(func)
        return results
    owned = {storage_key(operand) for operand in operands}
    with mode:
        laid = [
            leaf if stride is None else _laid(leaf, stride, storage_key(leaf) in owned)
            for leaf, stride in zip(made, strides, strict=True)
        ]
    return pytree.tree_unflatten(laid, structure_of_results)


@lru_cache(maxsize=4096)
def _takes_out(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    return any(argument.is_out for argument in func._schema.arguments)


def _written(
    genuine: Callable[..., Any], mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Run an operator that writes ``out=``, and note it if its kernel chooses the strides.

    A kernel chooses the strides of a tensor that it resizes, by those of its operands.
    """
    operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    shapes = [t.shape for t in operands]
    differ = _may_differ(func, operands, ())
    results = genuine(mode, func, types, args, kwargs)
    if differ and shapes != [t.shape for t in operands]:
        _note(func)
    return results


def _note(func: Any) -> None:
    noted = _unanswered.get()
    if noted is not None:
        noted[str(func)] = None


@lru_cache(maxsize=4096)
def _may_be_asked(func: Any) -> bool:
    if not isinstance(func, OpOverload) or not (func.namespace == "aten" or is_function(func)):
        return False
    return func._schema.name not in _NEVER_ASKED and not _returns_written(func)


def _returns_written(func: OpOverload) -> bool:
    """Whether a result is an operand that is written, whose strides the operator keeps."""
    found = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and alias.is_write for alias in found)


@lru_cache(maxsize=4096)
def _draws(func: OpOverload) -> bool:
    """Whether the operator may draw from PyTorch's global generator."""
    return torch.Tag.nondeterministic_seeded in func.tags and not _takes(func, "generator")


def _takes(func: OpOverload, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _may_differ(
    func: Any, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> bool:
    """Whether the real kernel can run on such tensors, and a tensor is not contiguous."""
    tensors = (*operands, *results)
    if not all(type(t) in (FakeTensor, torch.Tensor) and _has_strides(t) for t in tensors):
        return False
    dense = all(t.stride() == _dense(tuple(t.shape)) for t in tensors)
    # The fake results of whole functions of PyTorch are dense, whatever the function returns.
    if dense and func._schema.name not in _TRANSPOSE_DENSE and not is_function(func):
        return False
    return all(map(_is_plain, tensors))


@lru_cache(maxsize=4096)
def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(make_contiguous_strides_for(shape))


def _has_strides(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and all(type(n) is int for n in tensor.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_conj() or tensor.is_neg()) and tensor.device.type in ("cpu", "cuda")


def _strides_of(
    func: OpOverload, given: Sequence[Any], structure: Any, made: Sequence[Any], fits: bool
) -> _Strides | None:
    """Return the strides of the kernel's results for such operands; None if it cannot run.

    Args:
        fits: whether the operands may have memory. If not, the operator must return a view.
    """
    key = (func, structure, *map(_described, given))
    try:
        if key in _known:
            return _known[key]
    except TypeError:  # An argument has no hash.
        return _asked(func, given, structure, made, fits)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    strides = _known[key] = _asked(func, given, structure, made, fits)
    return strides


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf


@contextmanager
def _generator_kept(func: OpOverload) -> Iterator[None]:
    state = torch.default_generator.get_state() if _draws(func) else None
    try:
        yield
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def _asked(
    func: OpOverload, given: Sequence[Any], structure: Any, made: Sequence[Any], fits: bool
) -> _Strides | None:
    with disable_current_modes(), DisablePythonDispatcher(), DisableTorchFunction():
        # Zeros are valid indices, and ones are valid divisors and pivots. PyTorch 2.11 does not
        # check pivots, and would write before the memory for zeros.
        for fill in (1,) if _takes(func, "pivots") else (0, 1):
            try:
                operands = [_filled(leaf, fill, fits) for leaf in given]
                args, kwargs = pytree.tree_unflatten(operands, structure)
                if _takes(func, "generator"):
                    kwargs = {**kwargs, "generator": torch.Generator(made[0].device)}
                with torch.no_grad(), _generator_kept(func):
                    found = pytree.tree_leaves(func(*args, **kwargs))
            except Exception:
                logger.debug("the kernel of %s refuses tensors of %s", func, fill, exc_info=True)
                continue
            if _shapes(found) != _shapes(made):
                return None
            return tuple(t.stride() if isinstance(t, torch.Tensor) else None for t in found)
    return None


def _filled(leaf: Any, fill: int, fits: bool) -> Any:
    """Return zeros or ones with the sizes and strides of a fake tensor; any other leaf as it is.

    Args:
        fits: whether the tensor may have memory; otherwise it is on the meta device.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    steps = zip(leaf.shape, leaf.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if leaf.numel() else 0
    memory = torch.zeros(extent, dtype=leaf.dtype, device=leaf.device if fits else "meta")
    return (memory.fill_(fill) if fill else memory).as_strided(leaf.shape, leaf.stride())


def _shapes(leaves: Sequence[Any]) -> list[Any]:
    return [t.shape if isinstance(t, torch.Tensor) else None for t in leaves]


def _laid(result: torch.Tensor, stride: tuple[int, ...], shares: bool) -> torch.Tensor:
    if result.stride() == stride:
        return result
    if shares:
        return result.as_strided(result.shape, stride, result.storage_offset())
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)
