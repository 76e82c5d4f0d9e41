"""Copy modules and values so that later changes of the originals do not reach the copies."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.contents import all_held, contents

logger = logging.getLogger(__name__)


def faithful_copy(value: Any, memo: dict[Any, Any]) -> Any:
    """Return ``copy.deepcopy`` of ``value`` with the attributes of its objects in their old order.

    In a plain deep copy, attributes that a class sets in its constructor come first, as in
    diffusers' ``FrozenDict``. Forward would then iterate over ``vars(...)`` in another order.
    """
    copied = copy.deepcopy(value, memo)
    # copy.deepcopy keeps the originals under the memo's own id.
    for original in memo.get(id(memo), ()):
        ours = getattr(memo.get(id(original)), "__dict__", None)
        theirs = getattr(original, "__dict__", None)
        if type(ours) is not dict or type(theirs) is not dict or ours.keys() != theirs.keys():
            continue
        if list(ours) != list(theirs):
            ordered = {name: ours[name] for name in theirs}
            ours.clear()
            ours.update(ordered)
    return copied


def itself(genuine: Callable[..., Any], tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return ``tensor``: a replacement of ``__deepcopy__`` for tensors that a copy shares."""
    return tensor


def copied_values(
    values: Mapping[Any, Any], instead: Mapping[int, nn.Module] | None = None
) -> dict[Any, Any]:
    """Return deep copies of ``values`` that share only tensors, modules and uncopyable objects.

    An uncopyable object is a lock, for example; the objects that hold it are copied.

    Args:
        instead: modules that the copies hold in place of others, by the ids of the replaced ones.
    """
    others = instead or {}
    copies = {}
    with ExitStack() as stack:
        for held_type in (torch.Tensor, nn.Parameter):
            stack.enter_context(patched_here(held_type, "__deepcopy__", itself))
        for key, value in values.items():
            modules = {id(m): others.get(id(m), m) for m in modules_held(value)}
            copies[key] = _copied_value(value, modules)
    return copies


def _copied_value(value: Any, memo: Mapping[int, Any]) -> Any:
    try:
        return faithful_copy(value, dict(memo))
    except Exception:
        logger.debug("%s cannot be copied as a whole", type(value).__name__)
    try:
        return faithful_copy(value, {**memo, **_uncopyable(value)})
    except Exception:
        return value


def _uncopyable(value: Any) -> dict[int, Any]:
    """Return the objects in ``value`` that hold no other objects and cannot be copied, by id."""
    found = {}
    for held in all_held(value):
        if not contents(held):
            try:
                copy.deepcopy(held)
            except Exception:
                found[id(held)] = held
    return found


def modules_held(value: Any) -> list[nn.Module]:
    """Return the modules in ``value``, including ``value`` itself."""
    return [held for held in all_held(value) if isinstance(held, nn.Module)]
