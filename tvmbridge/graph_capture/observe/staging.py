"""Staging: the stand-in of a module that is traced, in the state in which calls find the module.

It is observed first; side effects that compiled code would not repeat are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.contents import same_value
from tvmbridge.core.errors import BridgeError, CaptureError, DataDependentError, NotApartError
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.dependence import DependenceError
from tvmbridge.graph_capture.observe.adoption import Adoption
from tvmbridge.graph_capture.observe.attributes import values_in_place
from tvmbridge.graph_capture.observe.compile_flag import goes_another_way
from tvmbridge.graph_capture.observe.foreign import refuse_foreign
from tvmbridge.graph_capture.observe.hooks import traced_hooks
from tvmbridge.graph_capture.observe.observation import Observation, observe
from tvmbridge.graph_capture.observe.outside import restore_generators
from tvmbridge.graph_capture.observe.refusal import (
    advice_on_experts,
    raise_if_forward_refuses,
    refuse_at_sight,
    refuse_own_call,
    refuse_what_is_asked,
    user_line,
)
from tvmbridge.graph_capture.trace.adopted import adopt
from tvmbridge.graph_capture.trace.copies import copied_values, modules_held
from tvmbridge.graph_capture.trace.standins import (
    run_apart,
    stand_in,
    tensors_of,
    without_inference_state,
    without_own_call,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedModule:
    """A module to be traced instead of the user's, with what was observed of it.

    ``observation`` is None where forward cannot be run on fake tensors. ``is_compiling``: what
    ``torch.compiler.is_compiling()`` is to say while it is traced. ``autocast``: under which state
    of autocast forward runs. ``outside``: by name, the tensors that ``module`` has adopted, since
    forward reads them though they are not the user's module's. ``fx_passes`` rewrite the program
    that is captured.
    """

    module: nn.Module
    observation: Observation | None
    failure: BaseException | None = None
    is_compiling: bool = True
    autocast: Autocast = ()
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fx_passes: tuple[Any, ...] = ()


def staged(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    *,
    apart: bool = True,
    is_compiling: bool = True,
    autocast: Autocast = (),
) -> StagedModule:
    """A stand-in for ``module`` in the state in which its calls find it, and how they behave.

    Attributes that forward writes once and then finds as it wants them (caches, shapes that it
    has seen) are so in the stand-in. Without ``apart`` the module itself is traced. Forward is
    ``is_compiling`` that it is traced, unless it would do something else then. It runs under
    ``autocast``.

    Raises:
        NotApartError: the module cannot be copied.
        CaptureError: a tensor is not plain, or forward does at each call what compiled code would
            not repeat.
        UnsupportedOperatorError: its outputs share memory in a way that cannot be made again.
    """
    adoption, refusal = Adoption(), None
    stage: StagedModule | None = None
    watched = partial(_staged, module, args, kwargs, needs_grad, apart, is_compiling, autocast)
    try:
        stage = watched(adoption)
    except NotApartError:
        raise
    except CaptureError as error:
        refusal = error
    adopted = adoption.adoptable(module, pytree.tree_leaves((args, dict(kwargs)))) if apart else ()
    if adopted:
        return watched(Adoption(adopted))
    if refusal is not None:
        raise refusal
    assert stage is not None
    return stage


def _staged(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    apart: bool,
    is_compiling: bool,
    autocast: Autocast,
    adoption: Adoption,
) -> StagedModule:
    """:func:`staged`, by a stand-in that has adopted what ``adoption`` says; it notes the rest."""
    refuse_at_sight(module, args, kwargs)
    if not apart:
        refuse_own_call(module)
    originals: dict[int, nn.Module] = {}
    watch = partial(observe, args=args, kwargs=kwargs, needs_grad=needs_grad, autocast=autocast)
    watch = partial(watch, adoption=adoption)
    if apart:
        watch = partial(watch, left=None)
    actor = _actor(module, originals) if apart else module
    outside = adopt(actor, adoption.adopted)
    try:
        seen = watch(actor, is_compiling=is_compiling)
        leaves_traces = seen.writes or seen.assigned or seen.left or seen.kept or seen.changes
        # What hooks collect outside of the module is the user's, and is not added to here.
        collects = seen.changes and any(map(traced_hooks, actor.modules()))
        if leaves_traces and apart and not seen.impure and not collects:
            actor = _actor(module, originals)
            adopt(actor, adoption.adopted)
            run_apart(actor, args, kwargs, autocast)
            restore_generators(seen.outside)
            again = watch(actor, is_compiling=is_compiling)
            counted = _attributes_among(actor, again.writes)
            grown = any(way.into != "place" for way in again.left.values())
            watch = partial(watch, left=[*again.left, *counted])
            if counted or grown:
                again = _watched_again(partial(watch, actor), again, is_compiling)
            # What it wrote must be in place at a call, although it may never read it.
            written = {*map(_split, seen.writes), *seen.left} - again.left.keys()
            in_place = values_in_place(actor, written, again.objects, module)
            seen = _settled(seen, replace(again, values={**again.values, **in_place}))
    except DependenceError as error:
        message = f"{error.at(user_line(error))}{advice_on_experts(module)}"
        kind = DataDependentError if error.in_parts else CaptureError
        raise kind(message) from error
    except BridgeError:
        raise
    except Exception as error:
        logger.debug("forward cannot be observed", exc_info=True)
        raise_if_forward_refuses(module, args, kwargs, autocast)
        return StagedModule(
            _actor(module) if apart else module, None, error, is_compiling, autocast
        )
    asks_that = is_compiling and Question.COMPILED in seen.asks
    if asks_that and goes_another_way(module, partial(watch, actor)):
        return _staged(module, args, kwargs, needs_grad, apart, False, autocast, adoption)
    seen = replace(seen, asks=seen.asks - {Question.COMPILED})
    if apart:
        _refuse_to_part(module, seen)
    refuse_foreign(module, seen.foreign_modules)
    _refuse_effects(module, seen)
    if adoption.adopted or not apart:
        adoption.refuse_stale(module)
    refuse_what_is_asked(module, (args, dict(kwargs)), seen.asks)
    if apart:
        seen = replace(seen, values=_of_users(seen.values, originals))
    else:
        seen = replace(seen, values=copied_values(seen.values), assigned={})
    of_foreign = (each.watched(originals) for each in seen.foreign_constants)
    seen = replace(seen, outside=(*seen.outside, *of_foreign))
    return StagedModule(actor, seen, is_compiling=is_compiling, autocast=autocast, outside=outside)


def _refuse_effects(module: nn.Module, seen: Observation) -> None:
    found = [f"writes {name}" for name in seen.writes]
    found += seen.impure
    found += [f"changes {name} outside of the module" for name in seen.changes]
    if found:
        raise CaptureError(
            f"forward of {type(module).__name__} {', '.join(found)}, which compiled code would "
            "not do at each call"
        )
    if seen.kept:
        raise CaptureError(
            f"forward of {type(module).__name__} keeps a tensor of each call outside of the "
            "module, in a cache or a global, which compiled code would not do"
        )


def _settled(first: Observation, again: Observation) -> Observation:
    """``again``, with the attributes that both runs assign the same value as assigned, not
    expected.
    """
    earlier = first.assigned
    assigned = {
        k: v for k, v in again.assigned.items() if k in earlier and same_value(earlier[k], v)
    }
    values = {key: value for key, value in again.values.items() if key not in assigned}
    return replace(again, values=values, assigned=assigned)


def _watched_again(
    watch: Callable[..., Observation], seen: Observation, is_compiling: bool
) -> Observation:
    """What is observed where stand-ins of numbers and lists note whether they are read."""
    try:
        return watch(is_compiling=is_compiling)
    except Exception:
        # C code has looked at a stand-in.
        logger.debug("numbers and lists are read", exc_info=True)
        grown = [".".join(filter(None, k)) for k, way in seen.left.items() if way.into != "place"]
        return replace(seen, writes=(*seen.writes, *grown))


def _attributes_among(module: nn.Module, names: Iterable[str]) -> list[tuple[str, str]]:
    """Those of ``names`` that are attributes, and neither parameters, buffers nor submodules."""
    found = []
    for path, name in map(_split, names):
        owner = module.get_submodule(path)
        if not any(name in held for held in (owner._parameters, owner._buffers, owner._modules)):
            found.append((path, name))
    return found


def _refuse_to_part(module: nn.Module, seen: Observation) -> None:
    """Raise NotApartError if what a stand-in read or ran past itself is of ``module``."""
    own = {id(m) for m in module.modules()}
    owned = {id(t): name for name, t in tensors_of(module).items()}
    if any(id(m) in own for m in seen.foreign_modules):
        raise NotApartError(f"forward of {type(module).__name__} reaches it past the stand-in")
    for tensor in seen.foreign:
        if id(tensor) in owned:
            raise NotApartError(f"forward reaches {owned[id(tensor)]} past the module")


def _of_users(
    values: Mapping[tuple[str, str], Any], originals: Mapping[int, nn.Module]
) -> dict[tuple[str, str], Any]:
    """``values`` of a stand-in, with the user's modules wherever they hold those of the stand-in.

    A method of a submodule, or a dict of submodules, is another one where its module is another.
    """
    holding = {key: value for key, value in values.items() if modules_held(value)}
    return {**values, **copied_values(holding, originals)}


def _actor(module: nn.Module, originals: dict[int, nn.Module] | None = None) -> nn.Module:
    """A stand-in without hooks or a ``__call__`` of its own, which run outside of forward."""
    actor = stand_in(module, originals)
    if actor is None:
        raise NotApartError(f"{type(module).__name__} cannot be copied")
    without_own_call(actor)
    without_inference_state(actor)
    for name, value in actor.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value.clear()
    return actor


def _split(name: str) -> tuple[str, str]:
    path, _, attribute = name.rpartition(".")
    return path, attribute
