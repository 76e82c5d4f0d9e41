"""Observation: forward is run once on fake tensors, before it is captured, and looked at.

The captured graph is a pure function. What else forward does is seen here: attributes that it
reads, attributes that it writes, outputs that share memory, random numbers that are not PyTorch's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from tvmbridge.aliasing import Sharing, aliases_of, refuse_exchanged
from tvmbridge.arguments import ArgumentWatch
from tvmbridge.attributes import (
    recorded_assignments,
    recorded_reads,
    values_assigned,
    values_read,
)
from tvmbridge.contents import contents, same_value
from tvmbridge.dependence import DependenceError
from tvmbridge.effects import (
    GradModeWatch,
    LayoutWatch,
    all_held,
    impurities,
    snapshot,
    written,
    wrote,
)
from tvmbridge.errors import BridgeError, CaptureError
from tvmbridge.foreign import ForeignModules, ForeignTensors, refuse_foreign
from tvmbridge.leaks import Made, saved_without_circles
from tvmbridge.refusal import refuse_at_sight, refuse_own_call, user_line
from tvmbridge.standins import (
    copied_values,
    run_apart,
    stand_in,
    tensors_of,
    tensors_replaced,
    without_autocast,
    without_inference_state,
    without_own_call,
)
from tvmbridge.structure import unflatten
from tvmbridge.tail import TailWatch
from tvmbridge.tracing import run_on_fakes
from tvmbridge.views import ViewWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """What forward does beside computing.

    ``values`` are the attributes that it reads, by (submodule's name, attribute's name);
    ``assigned`` are those that it gives a constant value before it may read them, with that value;
    ``writes`` names those that it changes. ``structure`` and ``sharing`` describe what it returns.
    ``rebound`` are the buffers that it exchanges for others rather than writing into them.
    ``impure`` says what else it does that compiled code would not repeat. ``foreign`` are the
    tensors that it reads, ``foreign_modules`` the modules with a state that it runs, though they
    are not its own. ``kept``: a tensor that it made outlived the call.
    ``asks_layout``: it looks at strides or offsets. ``infers``: it returns tensors that it makes in
    inference mode.
    """

    values: Mapping[tuple[str, str], Any]
    assigned: Mapping[tuple[str, str], Any]
    writes: tuple[str, ...]
    structure: pytree.TreeSpec
    sharing: Sharing
    rebound: frozenset[str]
    impure: tuple[str, ...]
    foreign: tuple[torch.Tensor, ...] = ()
    foreign_modules: tuple[nn.Module, ...] = ()
    kept: bool = False
    asks_layout: bool = False
    infers: bool = False


@dataclass(frozen=True)
class Stage:
    """A module to be traced instead of the user's, with what was observed of it.

    ``observation`` is None where forward cannot be run on fake tensors.
    """

    module: nn.Module
    observation: Observation | None
    failure: BaseException | None = None


class NotApartError(CaptureError):
    """A module that cannot be traced by a stand-in, but only itself."""


def staged(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    *,
    apart: bool = True,
) -> Stage:
    """A stand-in for ``module`` in the state in which its calls find it, and how they behave.

    Attributes that forward writes once and then finds as it wants them (caches, shapes that it
    has seen) are so in the stand-in. Without ``apart`` the module itself is traced.

    Raises:
        NotApartError: the module cannot be copied.
        CaptureError: a tensor is not plain, or forward does at each call what compiled code would
            not repeat.
        UnsupportedOperatorError: its outputs share memory in a way that cannot be made again.
    """
    refuse_at_sight(module, args, kwargs)
    if not apart:
        refuse_own_call(module)
    actor = _actor(module) if apart else module
    try:
        seen = observe(actor, args, kwargs, needs_grad)
        if (seen.writes or seen.assigned or seen.kept) and apart and not seen.impure:
            actor = _actor(module)
            run_apart(actor, args, kwargs)
            again = observe(actor, args, kwargs, needs_grad)
            # What it wrote must be in place at a call, although it may never read it.
            in_place = values_read(actor, {_split(name) for name in seen.writes})
            seen = _settled(seen, replace(again, values={**again.values, **in_place}))
    except DependenceError as error:
        raise CaptureError(f"{error}, at {user_line(error) or 'an unknown line'}") from error
    except BridgeError:
        raise
    except Exception as error:
        logger.debug("forward cannot be observed", exc_info=True)
        return Stage(_actor(module) if apart else module, None, error)
    if apart:
        _refuse_to_part(module, seen)
    refuse_foreign(module, seen.foreign_modules)
    found = [f"writes {name}" for name in seen.writes] + list(seen.impure)
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
    if not apart:
        seen = replace(seen, values=copied_values(seen.values), assigned={})
    return Stage(actor, seen)


def _settled(first: Observation, again: Observation) -> Observation:
    """``again``; what both give the same value is assigned at calls, and not expected before."""
    earlier = first.assigned
    assigned = {
        k: v for k, v in again.assigned.items() if k in earlier and same_value(earlier[k], v)
    }
    values = {key: value for key, value in again.values.items() if key not in assigned}
    return replace(again, values=values, assigned=assigned)


def _refuse_to_part(module: nn.Module, seen: Observation) -> None:
    """Raise NotApartError if what a stand-in read or ran past itself is of ``module``."""
    own = {id(m) for m in module.modules()}
    owned = {id(t): name for name, t in tensors_of(module).items()}
    if any(id(m) in own for m in seen.foreign_modules):
        raise NotApartError(f"forward of {type(module).__name__} reaches it past the stand-in")
    for tensor in seen.foreign:
        if id(tensor) in owned:
            raise NotApartError(f"forward reaches {owned[id(tensor)]} past the module")


def _actor(module: nn.Module) -> nn.Module:
    """A stand-in without hooks or a ``__call__`` of its own, which run outside of forward."""
    actor = stand_in(module)
    if actor is None:
        raise NotApartError(f"{type(module).__name__} cannot be copied")
    without_own_call(actor)
    without_inference_state(actor)
    for name, value in actor.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value.clear()
    return actor


def observe(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], needs_grad: bool
) -> Observation:
    """Run forward on fake tensors with the shapes of the arguments, and note what it does."""
    made = Made()
    try:
        with saved_without_circles():
            seen = _observe(module, args, kwargs, needs_grad, made)
    finally:
        kept = made.forget()
    return replace(seen, kept=kept)


def _observe(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    made: Made,
) -> Observation:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    # Each argument is a primal of its own, even where two are one tensor, or one is a parameter.
    given = [_fake(mode, leaf) for leaf in leaves]
    held = {id(t): _fake(mode, t) for t in _all_tensors(module)}
    named = {id(t) for t in tensors_of(module).values()}
    beside = {id(held[id(t)]): t for t in _all_tensors(module) if id(t) not in named}
    others = ForeignModules()
    with ExitStack() as stack:
        impure = stack.enter_context(impurities())
        reads = stack.enter_context(recorded_reads(module, others))
        assignments = stack.enter_context(recorded_assignments(module, reads))
        for context in (mode, torch.set_grad_enabled(needs_grad), without_autocast()):
            stack.enter_context(context)
        stack.enter_context(run_on_fakes(module))
        stack.enter_context(tensors_replaced(module, held))
        before, state = snapshot(module), tensors_of(module)
        versions = {id(t): t._version for t in held.values()}
        writable = {id(t) for t in (*module.parameters(), *module.buffers())}
        reads.clear()
        assignments.clear()
        others.forget()
        fake_args, fake_kwargs = unflatten(given, structure)
        forward = TailWatch(ArgumentWatch(module.forward), differentiated=needs_grad)
        with (
            made,
            ForeignTensors(beside) as foreign,
            ViewWatch() as views,
            LayoutWatch() as layouts,
            GradModeWatch() as gradients,
            others.noticing_new_ones(),
        ):
            results, returned = pytree.tree_flatten(forward(*fake_args, **fake_kwargs))
        if gradients.turned_on and not needs_grad:
            impure.append("turns gradients on, which may be off at a call,")
        if torch.is_grad_enabled() != needs_grad:
            impure.append("leaves another gradient mode than it found")
        read, after = set(reads), tensors_of(module)
        assigned = values_assigned(module, set(assignments))
        writes = written(before, snapshot(module))
        inputs = {i: t for i, t in enumerate(given) if isinstance(t, torch.Tensor)}
        sharing = aliases_of(results, inputs, after, views if needs_grad else None)
        if wrote(_all_tensors(module), versions, writable):
            impure.append("writes into a tensor that is neither an input nor a buffer")
        rebound = {n: t for n, t in state.items() if after.get(n, t) is not t}
        refuse_exchanged(rebound, results, sharing)
    if needs_grad:
        impure += foreign.without_gradient()
    values = values_read(module, read)
    for (path, name), value in values.items():
        if any(isinstance(held, Iterator) for held in all_held(value, 4)):
            impure.append(f"reads the iterator {path}.{name}".replace(" .", " "))
    return Observation(
        values,
        assigned,
        writes,
        returned,
        sharing,
        frozenset(rebound),
        tuple(impure),
        tuple(foreign.found.values()),
        tuple(others.stateful()),
        asks_layout=layouts.asked,
        infers=any(isinstance(t, torch.Tensor) and t.is_inference() for t in results),
    )


def _all_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The module's tensors, those in lists and dicts among its attributes too."""
    found = list(tensors_of(module).values())
    for owner in module.modules():
        for name, value in owner.__dict__.items():
            if name not in ("_parameters", "_buffers"):
                found += [t for t in contents(value) if isinstance(t, torch.Tensor)]
    return found


def _split(name: str) -> tuple[str, str]:
    path, _, attribute = name.rpartition(".")
    return path, attribute


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    # Where no gradient is asked for, views of it say so too, and detached ones do not.
    return fake.requires_grad_() if value.requires_grad and not fake.is_inference() else fake
