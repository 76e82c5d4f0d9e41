"""Stand-ins: copies of modules for tracing, which share only the tensors with the originals.

A trace replaces the tensors of a module by fake ones, and forward may write attributes. Neither
may be visible to the user or to other threads that run the module.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd import forward_ad

from tvmbridge.calls.copies import faithful_copy, itself
from tvmbridge.calls.generators import Generators
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.autocast import Autocast, under_autocast, without_autocast
from tvmbridge.core.structure import map_tensors
from tvmbridge.core.torch_private import (
    TransformType,
    dispatch_keys_excluded,
    dispatch_keys_forced,
    dispatch_keys_included,
    end_forward_level,
    end_functionalize,
    end_grad,
    end_jvp,
    end_vmap,
    innermost_transform,
    pytree,
    transform_depth,
)

logger = logging.getLogger(__name__)

# A key in the memo of a deep copy: the copy is a stand-in, in which nothing is dispatched.
STAND_IN = "tvmbridge.stand_in"
# The value of an attribute that a stand-in must not have: the original dispatches a method of its
# class by an attribute of this name.
NO_ATTRIBUTE: Any = object()


class StandsForForward:
    """An object that is installed as a module's ``forward`` and computes the same.

    - ``own``: the forward that was set on the instance before; None if there was none.
    """

    own: Callable[..., Any] | None


def wrapped_dispatcher(forward: Any) -> StandsForForward | None:
    """Return the dispatcher that ``forward`` is or wraps (accelerate's ``prepare`` wraps it)."""
    while forward is not None and not isinstance(forward, StandsForForward):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def stand_in(module: nn.Module, originals: dict[int, nn.Module] | None = None) -> nn.Module | None:
    """Return a deep copy of ``module`` that holds the very same tensors.

    A forward that a library has wrapped is that of the module without the wrapper and the dispatch:
    the wrapper runs around the compiled code, and would call the dispatcher of the original.
    Return None if it cannot be copied: an attribute refuses, or the copy has other submodules.

    Args:
        originals: a dict that receives the original modules by the ids of their copies, or None.
    """
    memo: dict[Any, Any] = {STAND_IN: True}
    try:
        with ExitStack() as stack:
            for tensor_type in (torch.Tensor, nn.Parameter):
                stack.enter_context(patched_here(tensor_type, "__deepcopy__", itself))
            copied = faithful_copy(module, memo)
            if (behind := wrapped_dispatcher(module.__dict__.get("forward"))) is not None:
                copied.__dict__["forward"] = copy.deepcopy(behind, memo)
    except Exception as error:
        logger.info("%s is traced itself: it cannot be copied: %s", type(module).__name__, error)
        return None
    _remove_absent(copied)
    pairs = zip(module.named_modules(), copied.named_modules(), strict=False)
    alike = all(n == m and type(a) is type(b) for (n, a), (m, b) in pairs)
    if not alike or len(list(module.modules())) != len(list(copied.modules())):
        return None
    if originals is not None:
        # copy.deepcopy keeps the originals under the memo's own id.
        found = [m for m in memo.get(id(memo), ()) if isinstance(m, nn.Module)]
        originals.update({id(memo[id(m)]): m for m in found})
    return copied


def without_dispatch(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module`` with tensors of its own, in which nothing is dispatched."""
    copied = copy.deepcopy(module, {STAND_IN: True})  # type: ignore[dict-item]
    _remove_absent(copied)
    return copied


def _remove_absent(module: nn.Module) -> None:
    """Remove the attributes whose value is ``NO_ATTRIBUTE``."""
    for owner in module.modules():
        for name in [n for n, value in vars(owner).items() if value is NO_ATTRIBUTE]:
            del owner.__dict__[name]


def has_own_call(module: nn.Module) -> bool:
    """Whether the class of ``module`` overrides ``nn.Module.__call__``."""
    own = type(module).__call__ is not nn.Module.__call__
    return own and not isinstance(module, torch.fx.GraphModule)


def without_own_call(module: nn.Module) -> None:
    """Give a stand-in ``nn.Module.__call__``, because compiled code replaces forward alone."""
    if has_own_call(module):
        kind = type(module)
        body = {"__call__": nn.Module.__call__, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), body)


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Skip the hooks of ``module`` within the context; they run around the compiled code.

    Hooks of modules that PyTorch creates in a trace (``torch.export``, ``torch.fx``) are skipped
    too.
    """

    def call(genuine: Callable[..., Any], owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if owner is module or type(owner).__module__.startswith(("torch.export", "torch.fx")):
            return owner.forward(*args, **kwargs)
        return genuine(owner, *args, **kwargs)

    with patched_here(nn.Module, "_call_impl", call):
        yield


def without_inference_tensors(value: Any) -> Any:
    """Return ``value``, a structure of arguments, with clones in place of inference tensors."""
    return map_tensors(lambda t: _copied(t) if t.is_inference() else t, value)


def without_repetitions(value: Any) -> Any:
    """Return ``value``, a structure of arguments, with clones for repetitions of a tensor.

    A trace would represent two arguments that are one tensor by one fake tensor.
    """
    seen: set[int] = set()

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(once, value)


def without_inference_state(module: nn.Module) -> None:
    """Replace a stand-in's inference tensors by clones, which autograd can save for backward."""
    own = {id(t): t for t in tensors_of(module).values() if t.is_inference()}
    _exchange(module, {key: _copied(t) for key, t in own.items()})


def tensors_of(module: nn.Module, *, remove_duplicate: bool = False) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and tensors in plain attributes, by dotted name.

    A submodule that is registered in several places contributes its tensors under each name, or
    only under the first if ``remove_duplicate``.
    """
    found: dict[str, torch.Tensor] = {}
    for path, owner in module.named_modules(remove_duplicate=remove_duplicate):
        prefix = f"{path}." if path else ""
        for held in (owner._parameters, owner._buffers, owner.__dict__):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    found[prefix + name] = value
    return found


def anything_requires_grad(module: nn.Module, values: Any) -> bool:
    """Whether a tensor of ``module``, or among the structure ``values``, requires a gradient."""
    tensors = [*tensors_of(module).values(), *pytree.tree_leaves(values)]
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def run_apart(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], autocast: Autocast = ()
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Run forward once on copies of all real tensors; attributes that forward sets stay set.

    Afterwards the module has its own tensors again, and the global generators have their old
    states, even if forward raises.

    Returns:
        Pairs of a copy and the module's tensor, by the id of the copy.
    """
    own = {id(t): t for t in tensors_of(module).values()}
    copies = {key: _copied(t) for key, t in own.items()}
    args, kwargs = map_tensors(_copied, (args, dict(kwargs)))
    _exchange(module, copies)
    generators = Generators()
    try:
        with (
            transforms_ended(),
            torch.no_grad(),
            without_autocast(),
            under_autocast(autocast),
        ):
            module.forward(*args, **kwargs)
    finally:
        generators.restore()
        _exchange(module, {id(copy): own[key] for key, copy in copies.items()})
    return {id(copy): (copy, own[key]) for key, copy in copies.items()}


@contextmanager
def transforms_ended() -> Iterator[None]:
    """On exit, end the function transforms that began within the context and are still active.

    A graph of TorchDynamo begins and ends transforms by separate calls, so an error between the
    two leaves the transform active.
    """
    depth, level = transform_depth(), forward_ad._current_level
    include, exclude = dispatch_keys_included(), dispatch_keys_excluded()
    with dispatch_keys_forced(include, exclude):
        try:
            yield
        finally:
            _end_transforms(depth)
            while forward_ad._current_level > level:
                forward_ad.exit_dual_level()
            if level < 0:
                # A graph of TorchDynamo enters the level in C++ alone. Usually it has ended it.
                with suppress(RuntimeError):
                    end_forward_level(0)


def _end_transforms(depth: int) -> None:
    """End function transforms, the innermost first, until ``depth`` transforms are left."""
    ends = {
        TransformType.Vmap: end_vmap,
        TransformType.Grad: end_grad,
        TransformType.Jvp: end_jvp,
        TransformType.Functionalize: end_functionalize,
    }
    while transform_depth() > depth:
        ends[innermost_transform().key()]()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def _exchange(module: nn.Module, held: Mapping[int, torch.Tensor]) -> None:
    replaced = _Replaced(held)
    for owner in module.modules():
        for attributes in (owner.__dict__, owner._parameters, owner._buffers):
            for name, value in attributes.items():
                if name not in ("_parameters", "_buffers"):
                    attributes[name] = replaced(value)


@contextmanager
def tensors_replaced(module: nn.Module, held: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace the tensors of ``module`` within the context by ``held``, which maps ids to tensors.

    Tensors in lists that a module keeps in addition to its parameters, as recurrent layers do, are
    replaced too. On exit, all attributes are restored, including those that forward sets.
    """
    replaced = _Replaced(held)
    with attributes_put_back(module):
        for owner in module.modules():
            attributes = owner.__dict__
            attributes.update({name: replaced(value) for name, value in attributes.items()})
            for name in ("_parameters", "_buffers", "_modules"):
                attributes[name] = dict(attributes[name])
        yield


@contextmanager
def attributes_put_back(module: nn.Module) -> Iterator[None]:
    """On exit, restore the attributes of the module and its submodules to the same objects."""
    saved = [(m.__dict__, dict(m.__dict__)) for m in module.modules()]
    try:
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


class _Replaced:
    """Replaces tensors by id; called with the value of an attribute.

    A dict, list or tuple with such a tensor is copied. Modules that share a container also share
    its copy, because a module may read an item that another module writes.
    """

    def __init__(self, held: Mapping[int, torch.Tensor]) -> None:
        self._held = held
        self._copies: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        held = self._held
        if isinstance(value, torch.Tensor):
            return held.get(id(value), value)
        if type(value) is dict and any(id(v) in held for v in value.values()):
            copied: Any = {k: held.get(id(v), v) for k, v in value.items()}
        elif type(value) in (list, tuple) and any(id(v) in held for v in value):
            copied = type(value)(held.get(id(v), v) for v in value)
        else:
            return value
        return self._copies.setdefault(id(value), copied)


@contextmanager
def as_captured(is_compiling: bool = True) -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` return ``is_compiling`` within the context.

    All traces of a forward must take the same branches. Functions that cache tensors for later
    calls often skip the cache if it returns True, so that no fake tensor is cached.
    """
    place = torch.compiler
    with mock.patch.multiple(
        place, _is_compiling_flag=is_compiling, _is_exporting_flag=is_compiling
    ):
        yield
