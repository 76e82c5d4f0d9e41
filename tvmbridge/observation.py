"""Observation: forward is run once on fake tensors, before it is captured, and looked at.

The captured graph is a pure function. What else forward does is seen here: attributes that it
reads, attributes that it writes, outputs that share memory, random numbers that are not PyTorch's.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from tvmbridge.aliasing import aliases_of
from tvmbridge.arguments import ArgumentWatch
from tvmbridge.attributes import (
    recorded_assignments,
    recorded_reads,
    values_assigned,
    values_read,
)
from tvmbridge.contents import contents, same_value
from tvmbridge.dependence import DependenceError
from tvmbridge.errors import BridgeError, CaptureError
from tvmbridge.patches import patched_here
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
from tvmbridge.types import OutputAlias
from tvmbridge.views import ViewWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """What forward does beside computing.

    ``values`` are the attributes that it reads, by (submodule's name, attribute's name);
    ``assigned`` are those that it gives a constant value before it may read them, with that value;
    ``writes`` names those that it changes. ``structure`` and ``aliases`` describe what it returns.
    ``rebound`` are the buffers that it exchanges for others rather than writing into them.
    ``impure`` says what else it does that compiled code would not repeat.
    """

    values: Mapping[tuple[str, str], Any]
    assigned: Mapping[tuple[str, str], Any]
    writes: tuple[str, ...]
    structure: pytree.TreeSpec
    aliases: tuple[OutputAlias | None, ...]
    rebound: frozenset[str]
    impure: tuple[str, ...]


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
        if (seen.writes or seen.assigned) and apart and not seen.impure:
            actor = _actor(module)
            run_apart(actor, args, kwargs)
            again = observe(actor, args, kwargs, needs_grad)
            # What it wrote must be in place at a call, although it may never read it.
            written = values_read(actor, {_split(name) for name in seen.writes})
            seen = _settled(seen, replace(again, values={**again.values, **written}))
    except DependenceError as error:
        raise CaptureError(f"{error}, at {user_line(error) or 'an unknown line'}") from error
    except BridgeError:
        raise
    except Exception as error:
        logger.debug("forward cannot be observed", exc_info=True)
        return Stage(_actor(module) if apart else module, None, error)
    found = [f"writes {name}" for name in seen.writes] + list(seen.impure)
    if found:
        raise CaptureError(
            f"forward of {type(module).__name__} {', '.join(found)}, which compiled code would "
            "not do at each call"
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
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    # Each argument is a primal of its own, even where two are one tensor, or one is a parameter.
    given = [_fake(mode, leaf, needs_grad) for leaf in leaves]
    held = {id(t): _fake(mode, t, needs_grad) for t in _all_tensors(module)}
    with ExitStack() as stack:
        impure = stack.enter_context(_impurities())
        reads = stack.enter_context(recorded_reads(module))
        assignments = stack.enter_context(recorded_assignments(module, reads))
        for context in (mode, torch.set_grad_enabled(needs_grad), without_autocast()):
            stack.enter_context(context)
        stack.enter_context(run_on_fakes(module))
        stack.enter_context(tensors_replaced(module, held))
        before, state = _snapshot(module), tensors_of(module)
        versions = {id(t): t._version for t in held.values()}
        writable = {id(t) for t in (*module.parameters(), *module.buffers())}
        reads.clear()
        assignments.clear()
        fake_args, fake_kwargs = unflatten(given, structure)
        forward = TailWatch(ArgumentWatch(module.forward), differentiated=needs_grad)
        with ViewWatch() as views:
            results, returned = pytree.tree_flatten(forward(*fake_args, **fake_kwargs))
        read, after = set(reads), tensors_of(module)
        assigned = values_assigned(module, set(assignments))
        writes = _written(before, _snapshot(module))
        inputs = {i: t for i, t in enumerate(given) if isinstance(t, torch.Tensor)}
        aliases = aliases_of(results, inputs, after, views)
        if _wrote(_all_tensors(module), versions, writable):
            impure.append("writes into a tensor that is neither an input nor a buffer")
        rebound = frozenset(n for n, t in state.items() if after.get(n, t) is not t)
    values = values_read(module, read)
    for (path, name), value in values.items():
        if any(isinstance(held, Iterator) for held in _all_held(value, 4)):
            impure.append(f"reads the iterator {path}.{name}".replace(" .", " "))
    return Observation(values, assigned, writes, returned, aliases, rebound, tuple(impure))


def _all_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The module's tensors, those in lists and dicts among its attributes too."""
    found = list(tensors_of(module).values())
    for owner in module.modules():
        for name, value in owner.__dict__.items():
            if name not in ("_parameters", "_buffers"):
                found += [t for t in contents(value) if isinstance(t, torch.Tensor)]
    return found


def _wrote(
    tensors: Iterable[torch.Tensor], versions: Mapping[int, int], writable: set[int]
) -> bool:
    return any(t._version != versions.get(id(t), 0) for t in tensors if id(t) not in writable)


def _split(name: str) -> tuple[str, str]:
    path, _, attribute = name.rpartition(".")
    return path, attribute


def _fake(mode: FakeTensorMode, value: Any, needs_grad: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    return fake.requires_grad_() if needs_grad and value.requires_grad else fake


def _snapshot(module: nn.Module) -> dict[str, list[Any]]:
    """Everything that forward could write, by name, with what it holds; buffers by name alone."""
    found: dict[str, list[Any]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in owner.__dict__.items():
            if name == "_buffers":
                found.update({f"{prefix}{n}": [b is None] for n, b in value.items()})
            elif name in ("_parameters", "_modules"):
                found.update({f"{prefix}{n}": [v] for n, v in value.items()})
            elif not name.endswith("_hooks"):
                found[f"{prefix}{name}"] = _all_held(value, 4)
    return found


def _all_held(value: Any, depth: int) -> list[Any]:
    held = contents(value) if depth else []
    return [value, *(inner for item in held for inner in _all_held(item, depth - 1))]


def _written(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> tuple[str, ...]:
    written = [name for name in before if name not in after]
    for name, now in after.items():
        then = before.get(name, [])
        if len(now) != len(then) or not all(map(_unchanged, then, now)):
            written.append(name)
    return tuple(written)


def _unchanged(then: Any, now: Any) -> bool:
    # What containers hold follows them in the list.
    return then is now or (type(then) is type(now) and same_value(then, now, depth=0))


@contextmanager
def _impurities() -> Iterator[list[str]]:
    """Collects what forward does with random numbers beyond drawing them from PyTorch.

    All generators are as before afterwards.
    """
    found: list[str] = []

    def noting(what: str) -> Callable[..., Any]:
        def note(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found.append(what)
            return genuine(*args, **kwargs)

        return note

    python, numbers, ours = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        with (
            patched_here(torch, "manual_seed", noting("seeds PyTorch's generator")),
            patched_here(torch, "seed", noting("seeds PyTorch's generator")),
            patched_here(torch, "set_rng_state", noting("sets the state of PyTorch's generator")),
            patched_here(torch.random, "set_rng_state", noting("sets PyTorch's generator")),
        ):
            yield found
        if random.getstate() != python:
            found.append("draws from random")
        if repr(numpy.random.get_state()) != repr(numbers):
            found.append("draws from numpy.random")
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(ours)
