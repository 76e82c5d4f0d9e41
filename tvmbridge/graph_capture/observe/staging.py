"""Staging: prepare a stand-in, a copy of a module, that is traced in place of the module.

The stand-in is brought into the state that later calls of the module find. Forward is observed on
it, and side effects that compiled code would not repeat are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.copies import copied_values, modules_held
from tvmbridge.calls.standins import stand_in, tensors_of, without_inference_state, without_own_call
from tvmbridge.core.assumptions import Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.carried import CarriedPlace
from tvmbridge.core.contents import PartOf, all_held, same_value
from tvmbridge.core.errors import (
    BridgeError,
    CaptureError,
    DataDependentError,
    NotApartError,
    StateWrittenError,
)
from tvmbridge.core.number_places import numbers_changed
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import NumberKey, attribute_key
from tvmbridge.graph_capture.dependence import DependenceError
from tvmbridge.graph_capture.observe.adoption import Adoption
from tvmbridge.graph_capture.observe.attributes import values_in_place
from tvmbridge.graph_capture.observe.carrying import carry, with_any_tensor
from tvmbridge.graph_capture.observe.compile_flag import goes_another_way
from tvmbridge.graph_capture.observe.foreign import refuse_foreign
from tvmbridge.graph_capture.observe.hooks import traced_hooks
from tvmbridge.graph_capture.observe.names import compares, names_of
from tvmbridge.graph_capture.observe.observation import Observation, observe
from tvmbridge.graph_capture.observe.outside import restore_generators
from tvmbridge.graph_capture.observe.outside_tensors import run_unseen
from tvmbridge.graph_capture.observe.refusal import (
    advice_on_experts,
    raise_if_forward_refuses,
    refuse_at_sight,
    refuse_own_call,
    refuse_what_is_asked,
    user_line,
)
from tvmbridge.graph_capture.observe.undo import undone_if_refused
from tvmbridge.graph_capture.trace.adopted import adopt
from tvmbridge.graph_capture.trace.held_numbers import hold, start_again

logger = logging.getLogger(__name__)

_OF_IDENTITY = frozenset({"id", "hash"})


@dataclass(frozen=True)
class StagedModule:
    """A module to trace in place of the user's module, with the observation of its forward.

    - ``module``: the stand-in, or the user's module itself if it cannot be copied.
    - ``observation``: reads and effects of forward; None if forward does not run on fake tensors.
    - ``failure``: the exception that the run on fake tensors raised, if it did.
    - ``is_compiling``: what ``torch.compiler.is_compiling()`` returns during the trace.
    - ``autocast``: the autocast state that forward runs under.
    - ``outside``: the unregistered tensors that ``module`` has adopted as inputs, by name.
    - ``carried``: the places of tensors in containers that the previous call has left in
      attributes, by the names of their inputs.
    - ``fx_passes``: passes that rewrite the captured program.
    """

    module: nn.Module
    observation: Observation | None
    failure: BaseException | None = None
    is_compiling: bool = True
    autocast: Autocast = ()
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carried: Mapping[str, CarriedPlace] = field(default_factory=dict)
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
    """Prepare a stand-in for ``module`` in the state that later calls find, and observe forward.

    Forward may fill attributes such as caches in its first call and only read them later. The
    stand-in already has the filled attributes.

    Args:
        apart: trace a copy of the module; False: trace the module itself.
        is_compiling: what ``torch.compiler.is_compiling()`` returns during the trace. If True, but
            forward behaves differently in a call, False is used.

    Raises:
        NotApartError: the module cannot be copied.
        CaptureError: a tensor is not plain, or forward has effects at each call that compiled code
            would not repeat.
        UnsupportedOperatorError: outputs share memory in a way that cannot be reproduced.
    """
    adoption, refusal = Adoption(), None
    stage: StagedModule | None = None
    watched = partial(_staged, module, args, kwargs, needs_grad, apart, is_compiling, autocast)
    try:
        with undone_if_refused() as undo:
            if not apart:
                undo.note_module(module)
            stage = watched(adoption)
    except NotApartError:
        raise
    except CaptureError as error:
        refusal = error
    adopted = adoption.adoptable(module, pytree.tree_leaves((args, dict(kwargs)))) if apart else ()
    if adopted:
        with undone_if_refused():
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
    """Do the work of :func:`staged` for one adoption.

    The stand-in adopts the tensors that ``adoption`` lists. Further unregistered tensors that
    forward reads are recorded in ``adoption``.
    """
    refuse_at_sight(module, args, kwargs)
    if not apart:
        refuse_own_call(module)
    originals: dict[int, nn.Module] = {}
    watch = partial(observe, arguments=(args, kwargs), needs_grad=needs_grad, autocast=autocast)
    watch = partial(watch, adoption=adoption)
    if apart:
        watch = partial(watch, left=None)
    actor = _actor(module, originals) if apart else module
    outside = adopt(actor, adoption.adopted) | (hold(actor, module) if apart else {})
    carried: Mapping[str, CarriedPlace] = {}
    try:
        seen = watch(actor, is_compiling=is_compiling)
        leaves_traces = seen.writes or seen.assigned or seen.left or seen.kept or seen.changes
        # Traced hooks may collect values in the user's containers. A real run would add to them.
        collects = seen.changes and any(map(traced_hooks, actor.modules()))
        if leaves_traces and apart and not seen.impure and not collects:
            actor = _actor(module, originals)
            adopt(actor, adoption.adopted)
            outside |= hold(actor, module)
            run_unseen(actor, args, kwargs, autocast)
            start_again(actor)
            if needs_grad:
                _require_gradients_like(actor, module)
            restore_generators(seen.outside)
            again = watch(actor, is_compiling=is_compiling)
            counted = _attributes_among(actor, again.writes)
            grown = any(way.into != "place" for way in again.left.values())
            watch = partial(watch, left=[*again.left, *counted])
            carried = carry(actor, module, again, adoption)
            if counted or grown or carried:
                again = _watched_again(partial(watch, actor), again, is_compiling)
                again = replace(again, values=with_any_tensor(again.values, carried))
            # A value that the first run wrote must be there at a call, even if later runs do not
            # read it.
            left = {key for key in seen.left if len(key) == 2}
            written = {*map(attribute_key, seen.writes), *left} - again.left.keys()
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
    again_unseen = partial(run_unseen, actor, args, kwargs, autocast)
    _refuse_effects(module, seen, actor, None if seen.impure or not apart else again_unseen)
    if adoption.adopted or not apart:
        adoption.refuse_stale(module)
    refuse_what_is_asked(module, (args, dict(kwargs)), seen.asks)
    if apart:
        seen = replace(seen, values=_of_users(seen.values, originals))
    else:
        seen = replace(seen, values=copied_values(seen.values), assigned={})
    of_foreign = (each.watched(originals) for each in seen.foreign_constants)
    seen = replace(seen, outside=(*seen.outside, *of_foreign))
    return StagedModule(
        actor,
        seen,
        is_compiling=is_compiling,
        autocast=autocast,
        outside=outside,
        carried=carried,
    )


def _require_gradients_like(actor: nn.Module, module: nn.Module) -> None:
    """Make tensors in attributes require a gradient if those of the user's module do.

    The stand-in has run without autograd, while a call of the user's module has left tensors with
    a gradient in its attributes.
    """
    for path, owner in module.named_modules():
        mine = actor.get_submodule(path).__dict__
        for name, value in owner.__dict__.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                copied = mine.get(name)
                if isinstance(copied, torch.Tensor) and copied.is_leaf:
                    mine[name] = copied.detach().requires_grad_()


def _refuse_effects(
    module: nn.Module, seen: Observation, actor: nn.Module, run: Callable[[], None] | None
) -> None:
    found = [f"writes {name}" for name in seen.writes]
    found += seen.impure
    found += [f"changes {name} outside of the module" for name in seen.changes]
    found += [f"changes {name} in a checkpoint, which backward repeats" for name in seen.repeated]
    if found:
        raise StateWrittenError(
            f"forward of {type(module).__name__} {', '.join(found)}, which compiled code would "
            "not do at each call",
            frozenset(_places_written(module, seen.writes, actor, run)),
        )
    if seen.kept:
        raise StateWrittenError(
            f"forward of {type(module).__name__} keeps a tensor of each call outside of the "
            "module, in a cache or a global, which compiled code would not do"
        )


def _places_written(
    module: nn.Module,
    names: Iterable[str],
    actor: nn.Module,
    run: Callable[[], None] | None,
) -> Iterator[NumberKey]:
    """Yield the attributes that forward of ``actor`` has written, or the numbers inside them.

    Args:
        module: the user's module, which has the values before.
        run: runs forward of ``actor`` once more; None: that is not possible.
    """
    for path, name in map(attribute_key, names):
        now, before = (vars(m.get_submodule(path)).get(name) for m in (actor, module))
        changed = numbers_changed(now, before) if actor is not module else ()
        if changed == [] and run is not None:
            # A number that counts modulo the number of runs is what it was before them.
            run()
            changed, run = numbers_changed(now, before), None
        for steps in changed or ():
            yield (path, name, *steps)
        yield path, name


def _settled(first: Observation, again: Observation) -> Observation:
    """Return ``again`` without guards on attributes that both runs set to the same constant.

    Other attributes that forward assigns are left out of ``assigned``.
    """
    earlier = first.assigned
    assigned = {
        k: v for k, v in again.assigned.items() if k in earlier and same_value(earlier[k], v)
    }
    values = {key: value for key, value in again.values.items() if key not in assigned}
    executed = tuple(dict.fromkeys((*first.executed, *again.executed)))
    return replace(again, values=values, assigned=assigned, executed=executed)


def _watched_again(
    watch: Callable[..., Observation], seen: Observation, is_compiling: bool
) -> Observation:
    """Observe forward with recorders in place of the numbers and lists that it changes.

    A recorder shows whether forward only adds to the value or also reads it. If C code fails on a
    recorder, return ``seen`` with the lists that grow among its writes.
    """
    try:
        return watch(is_compiling=is_compiling)
    except Exception:
        # C code does not accept a recorder in place of the number or list.
        logger.debug("numbers and lists are read", exc_info=True)
        grown = [".".join(filter(None, k)) for k, way in seen.left.items() if way.into != "place"]
        return replace(seen, writes=(*seen.writes, *grown))


def _attributes_among(module: nn.Module, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the ``names`` that are no parameters, buffers or submodules, split at the last dot."""
    found = []
    for path, name in map(attribute_key, names):
        owner = module.get_submodule(path)
        if not any(name in held for held in (owner._parameters, owner._buffers, owner._modules)):
            found.append((path, name))
    return found


def _refuse_to_part(module: nn.Module, seen: Observation) -> None:
    """Refuse to trace a stand-in whose forward reaches the tensors or submodules of ``module``.

    Raises:
        NotApartError: forward read such a tensor or ran such a module.
    """
    own = {id(m) for m in module.modules()}
    owned = {id(t): name for name, t in tensors_of(module).items()}
    if any(id(m) in own for m in seen.foreign_modules):
        raise NotApartError(f"forward of {type(module).__name__} reaches it past the stand-in")
    for tensor in seen.foreign:
        if id(tensor) in owned:
            raise NotApartError(f"forward reaches {owned[id(tensor)]} past the module")
    # A stand-in is none of the user's modules, with which forward may compare itself.
    if any(names_of(code).globals & _OF_IDENTITY for code in seen.executed):
        raise NotApartError(f"forward of {type(module).__name__} may ask for its id")
    compared = any(map(compares, seen.executed))
    for value in (*seen.values.values(), *(each.expected for each in seen.outside)):
        if _may_be_met(value, own, compared):
            raise NotApartError(f"forward may compare a module of {type(module).__name__} with it")


def _may_be_met(value: Any, own: Collection[int], compared: bool) -> bool:
    """Whether forward may find one of the ``own`` modules in ``value``.

    It does if it compares (``compared``), or if a container has the module.
    """
    if type(value) is PartOf:
        return any(_may_be_met(each, own, compared) for each in value.attributes.values())
    if isinstance(value, nn.Module):
        return compared and id(value) in own
    return any(id(held) in own for held in all_held(value))


def _of_users(
    values: Mapping[tuple[str, str], Any], originals: Mapping[int, nn.Module]
) -> dict[tuple[str, str], Any]:
    """Return ``values`` of a stand-in with its modules replaced by the user's modules.

    Values such as bound methods and dicts of submodules hold modules; guards must compare them
    with the user's modules.
    """
    holding = {key: value for key, value in values.items() if modules_held(value)}
    return {**values, **copied_values(holding, originals)}


def _actor(module: nn.Module, originals: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return a stand-in of ``module`` that runs forward alone.

    Its own hooks, and a ``__call__`` of its class, are removed: they run around the compiled code.

    Args:
        originals: a dict to fill with the user's modules by the ids of their copies.

    Raises:
        NotApartError: the module cannot be copied.
    """
    actor = stand_in(module, originals)
    if actor is None:
        raise NotApartError(f"{type(module).__name__} cannot be copied")
    without_own_call(actor)
    without_inference_state(actor)
    for name, value in actor.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value.clear()
    return actor
