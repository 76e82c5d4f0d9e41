"""Trace activation checkpoints in forward as plain calls: compiled code does not recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.set_within import set_within
from tvmbridge.core.torch_private import TorchDispatchMode, pytree, storage_key
from tvmbridge.core.writes import written_by
from tvmbridge.graph_capture.hoist import is_random

_aten = torch.ops.aten
# Their schemas do not declare that they write running statistics.
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
_THE_SAME_TWICE = frozenset(
    {
        _aten.relu_.default,
        _aten.hardtanh_.default,
        _aten.clamp_.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
    }
)


# The module that is traced, and the attributes that functions in its checkpoints have changed.
_traced: ContextVar[tuple[nn.Module, set[str]] | None] = ContextVar("traced", default=None)


@contextmanager
def plain_checkpoints(module: nn.Module) -> Iterator[set[str]]:
    """Run checkpointed functions as plain calls within the context; the gradients are the same.

    Yields the dotted names of the numbers and lists in attributes of ``module`` that such functions
    have changed so far. Eager PyTorch changes them once more in backward.
    """
    place, changed = torch.utils.checkpoint, set[str]()
    with (
        set_within(_traced, (module, changed)),
        patched_here(place.CheckpointFunction, "apply", _plain_reentrant),
        patched_here(place, *_GENERATOR),
    ):
        yield changed


def changed_in_checkpoints() -> tuple[str, ...]:
    """Return the dotted names that the innermost :func:`plain_checkpoints` yields."""
    traced = _traced.get()
    return () if traced is None else tuple(sorted(traced[1]))


def _plain_reentrant(genuine: Any, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Call ``function`` once; autograd records it only if an argument requires a gradient.

    A reentrant checkpoint has the same condition.
    """
    connected = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(connected and torch.is_grad_enabled()), _once(preserve_rng_state):
        results = function(*args)
        return _as_one(results) if torch.is_grad_enabled() else results


def _as_one(results: Any) -> Any:
    """Return ``results`` as outputs of one autograd node, as a reentrant checkpoint does."""
    several = results if isinstance(results, tuple) else (results,)
    floating = [i for i, r in enumerate(several) if _is_floating(r)]
    required = [several[i].requires_grad for i in floating]
    # Autograd does not see tensors in nested containers of a reentrant checkpoint's results.
    found = [
        r if _is_floating(r) else pytree.tree_map_only(torch.Tensor, _detach, r) for r in several
    ]
    if len(floating) > 1 or not all(required):
        given = ReentrantCheckpoint.apply(*(several[i] for i in floating))  # type: ignore[no-untyped-call]
        for place, result in zip(floating, given, strict=True):
            found[place] = result
    return tuple(found) if isinstance(results, tuple) else found[0]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


class ReentrantCheckpoint(torch.autograd.Function):
    """One autograd node for all results, so that undefined gradients of some become zeros."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(r.clone() for r in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _plain_generator(
    genuine: Any, function: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any
) -> Iterator[None]:
    with _once(preserve_rng_state):
        yield


def _plain_generator_impl(
    genuine: Any, function: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool, **options: Any
) -> Iterator[None]:
    return _plain_generator(genuine, function, preserve_rng_state)


# The function of PyTorch that runs a checkpoint without reentrant autograd, and its replacement.
_GENERATOR: tuple[str, Callable[..., Any]]
if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl"):
    _GENERATOR = "_checkpoint_without_reentrant_generator_impl", _plain_generator_impl
else:  # before PyTorch 2.14
    _GENERATOR = "_checkpoint_without_reentrant_generator", _plain_generator


def _once(preserves_rng_state: bool) -> AbstractContextManager[Any]:
    """Return a mode that refuses effects that a recomputation in eager PyTorch would change."""
    return _RecomputationCheck(preserves_rng_state) if torch.is_grad_enabled() else nullcontext()


class _RecomputationCheck(TorchDispatchMode):
    """Refuses functions in a checkpoint whose recomputation has other effects than one run.

    It refuses random draws if the checkpoint does not preserve the RNG state, and writes into
    tensors from outside the checkpoint.
    """

    def __init__(self, preserves_rng_state: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._preserves_rng_state = preserves_rng_state
        self._reason: str | None = None
        self._recorded = False
        # By storage. The tensors are held, so that no other storage gets their address.
        self._made: dict[int, torch.Tensor] = {}
        self._counted = _numbers_and_lengths()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._preserves_rng_state and is_random(func, args, kwargs or {}):
            raise UnsupportedOperatorError(
                f"forward draws by {func} within checkpoint(preserve_rng_state=False), which "
                "computes the gradient with other numbers than forward drew"
            )
        given = _storages((args, kwargs))
        self._recorded |= any(t.requires_grad for t in given.values())
        written = _storages(_written(func, args, kwargs or {}))
        if func not in _THE_SAME_TWICE and not written.keys() <= self._made.keys():
            self._reason = str(func)
        results = func(*args, **(kwargs or {}))
        made = _storages(results)
        self._made.update({key: made[key] for key in made.keys() - given.keys()})
        return results

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        traced, before = _traced.get(), self._counted
        if kind is None and self._recorded and traced is not None:
            now = _numbers_and_lengths().items()
            traced[1].update(name for name, v in now if _differs(v, before.get(name)))
        # Backward recomputes the function only if autograd recorded it.
        if kind is None and self._recorded and self._reason:
            raise UnsupportedOperatorError(
                f"forward writes by {self._reason}, within a checkpoint, into a tensor that was "
                "there before (a buffer of batch norm, say), which eager PyTorch does again in "
                "backward: leave the checkpoint out, since compiled code saves memory by itself"
            )


def _numbers_and_lengths() -> Mapping[str, Any]:
    """Return the numbers in attributes of the traced module, and the lengths of lists, by name."""
    traced = _traced.get()
    found: dict[str, Any] = {}
    for path, owner in () if traced is None else traced[0].named_modules():
        for name, value in owner.__dict__.items():
            # Stand-ins of numbers and lists say that they are numbers and lists.
            if isinstance(value, list):
                found[f"{path}.{name}".lstrip(".")] = list.__len__(value)
            elif isinstance(value, int | float):
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def _differs(value: Any, before: Any) -> bool:
    is_plain = type(value) in (bool, int, float) and type(before) is type(value)
    return value != before if is_plain else value is not before


def _storages(values: Any) -> dict[int, torch.Tensor]:
    return {storage_key(t): t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)}


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that a call mutates."""
    if func in _BATCH_NORMS and args[5]:
        return list(args[3:5])
    return written_by(func, args, kwargs)
