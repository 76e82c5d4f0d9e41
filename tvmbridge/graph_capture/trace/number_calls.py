"""Calls of forward with traced numbers in place of the numbers among its arguments."""

from __future__ import annotations

import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.core.structure import unflatten
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.trace.held_numbers import HeldOfCall
from tvmbridge.graph_capture.trace.number_functions import NumberFunctions, numbers_in
from tvmbridge.graph_capture.trace.number_math import math_traced
from tvmbridge.graph_capture.trace.traced_numbers import NumbersOfCall, TracedNumber

_Function = Callable[..., Any]
_OF_MODULES = frozenset(vars(nn.Module()))
# A container, its leaves and its structure.
_Flat = tuple[Any, list[Any], pytree.TreeSpec]


@contextmanager
def numbers_traced(
    module: nn.Module, ranges: dict[int, NumberRange], held: HeldOfCall
) -> Iterator[Callable[[_Function, Any, Any], Any]]:
    """Yield a function that calls forward with traced numbers among its arguments.

    Args:
        ranges: by the position of a leaf, the values of the number; the call narrows them.
    """
    of = NumbersOfCall({**ranges, **held.by_leaf()})
    contexts: weakref.WeakSet[BackwardCFunction] = weakref.WeakSet()

    def kept(genuine: Any, context: BackwardCFunction, name: str, value: Any) -> None:
        genuine(context, name, value)
        if numbers_in(value):
            contexts.add(context)

    def call(forward: _Function, args: Any, kwargs: Any) -> Any:
        given, checked = _with_numbers(of, [*args, *kwargs.values()])
        named = dict(zip(kwargs, given[len(args) :], strict=True))
        with held.in_attributes(of):
            results = _with_values(forward(*given[: len(args)], **named))
        _keep_values(module)
        if not all(map(_is_as_before, checked)):
            raise NumberReadError("forward changes an argument that holds it", frozenset(of.ranges))
        del given, named, checked
        saved = Counter(id(n) for context in contexts for n in numbers_in(vars(context)))
        _refuse_kept(of, module, results, saved)
        return results

    setting = patched_here(BackwardCFunction, "__setattr__", kept, over=True)
    with NumberFunctions(), math_traced(), setting:
        try:
            yield call
        except NumberReadError as error:
            error.attributes = held.keys(error.leaves)
            raise
        except Exception:
            if of.refusal is None:
                raise
            of.refusal.attributes = held.keys(of.refusal.leaves)
            raise of.refusal from None


def _with_numbers(of: NumbersOfCall, values: Sequence[Any]) -> tuple[list[Any], list[_Flat]]:
    """Return the arguments with traced numbers in them, and the containers that hold these.

    Other arguments stay the same objects, whose mutation the caller notices.
    """
    given, containers, place = [], [], 0
    for value in values:
        leaves, structure = pytree.tree_flatten(value)
        numbers = of.ranges.keys() & range(place, place + len(leaves))
        for i in numbers:
            leaves[i - place] = of.traced(i, leaves[i - place])
        place += len(leaves)
        given.append(unflatten(leaves, structure) if numbers else value)
        if numbers:
            containers.append((given[-1], leaves, structure))
    return given, containers


def _is_as_before(container: _Flat) -> bool:
    value, leaves, structure = container
    found, now = pytree.tree_flatten(value)
    return now == structure and all(map(operator.is_, found, leaves))


def _with_values(results: Any) -> Any:
    """Return ``results`` with data-dependent numbers, which a call computes, for traced ones."""
    leaves, structure = pytree.tree_flatten(results)
    if not any(type(leaf) is TracedNumber for leaf in leaves):
        return results
    values = [leaf.tensor.item() if type(leaf) is TracedNumber else leaf for leaf in leaves]
    return pytree.tree_unflatten(values, structure)


def _keep_values(module: nn.Module) -> None:
    """Replace the traced numbers that forward has left in attributes as :func:`_with_values`."""
    for held in (each.__dict__ for each in module.modules()):
        for name, value in held.items():
            if not isinstance(value, torch.Tensor | nn.Module) and name not in _OF_MODULES:
                held[name] = _with_values(value)


@contextmanager
def numbers_in_backward(ranges: Mapping[int, NumberRange], held: HeldOfCall) -> Iterator[None]:
    """Let backwards of custom autograd functions compute with numbers that forwards have kept.

    Raises:
        NumberReadError: a backward branches on a number, or limits the values that it serves.
    """
    known = {**ranges, **held.by_leaf()}
    before = {leaf: str(each) for leaf, each in known.items()}

    def applied(genuine: Any, context: BackwardCFunction, *gradients: Any) -> Any:
        with NumberFunctions():
            return genuine(context, *gradients)

    try:
        with patched_here(BackwardCFunction, "apply", applied, over=True):
            yield
        limited = frozenset(leaf for leaf, each in known.items() if str(each) != before[leaf])
        if limited:
            what = "the backward of a custom autograd function branches on it, or limits its values"
            raise NumberReadError(what, limited)
    except NumberReadError as error:
        error.attributes = held.keys(error.leaves)
        raise


def _refuse_kept(
    of: NumbersOfCall, module: nn.Module, results: Any, saved: Mapping[int, int]
) -> None:
    """Refuse numbers that outlive the call, and parts of tensors that must be views.

    Args:
        saved: by the id of a number, how often contexts of custom autograd functions hold it.
    """
    if of.refusal is not None:  # forward has caught it
        raise of.refusal
    for number in (known() for known in of.made):
        # Its references: those of contexts, the variable ``number``, and the argument.
        if number is not None and sys.getrefcount(number) != saved.get(id(number), 0) + 2:
            raise number.refused("returns it, or keeps it beyond the call")
    everywhere = frozenset(of.ranges)
    if any(tensor._version != version for tensor, version in of.selected):
        raise NumberReadError("forward writes into a tensor that it indexes by it", everywhere)
    storages = {t.untyped_storage()._cdata for t, _ in of.selected[1::2]}
    kept = [v for m in module.modules() for v in (*m.__dict__.values(), *m._buffers.values())]
    tensors = (v for v in pytree.tree_leaves((results, kept)) if isinstance(v, torch.Tensor))
    if storages and any(t.untyped_storage()._cdata in storages for t in tensors):
        raise NumberReadError("forward returns or keeps a part that it indexes by it", everywhere)
