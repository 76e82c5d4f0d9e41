"""Observation: forward is run once on fake tensors, before it is captured, and looked at.

The captured graph is a pure function. What else forward does is seen here: attributes that it
reads, attributes that it writes, outputs that share memory, random numbers that are not PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from tvmbridge.memory.aliasing import Sharing, aliases_of, refuse_exchanged
from tvmbridge.memory.layouts import dense_strides
from tvmbridge.memory.views import ViewWatch
from tvmbridge.observing.arguments import ArgumentWatch
from tvmbridge.observing.attributes import (
    recorded_assignments,
    recorded_reads,
    values_assigned,
    values_read,
)
from tvmbridge.observing.contents import contents
from tvmbridge.observing.effects import (
    QuestionWatch,
    all_held,
    impurities,
    snapshot,
    written,
    wrote,
)
from tvmbridge.observing.foreign import ForeignModules, ForeignTensors
from tvmbridge.observing.leaks import (
    Made,
    collections_put_off,
    release_frames,
    saved_without_circles,
)
from tvmbridge.observing.outside import OutsideReads
from tvmbridge.reads import OutsideValue, Question
from tvmbridge.structure import unflatten
from tvmbridge.tail import TailWatch
from tvmbridge.tracing.functions import run_on_fakes
from tvmbridge.tracing.standins import (
    tensors_of,
    tensors_replaced,
    without_autocast,
)


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
    ``outside`` are values that it reads and that are not the module's, ``changes`` names those of
    them that it changes, and ``asks`` is what it asks of tensors.
    ``strides`` are those of what it returns; see :func:`tvmbridge.memory.layouts.dense_strides`.
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
    outside: tuple[OutsideValue, ...] = ()
    changes: tuple[str, ...] = ()
    asks: frozenset[Question] = frozenset()
    strides: tuple[tuple[int, ...] | None, ...] = ()


def observe(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    within: Iterable[AbstractContextManager[Any]] = (),
) -> Observation:
    """Run forward on fake tensors with the shapes of the arguments, and note what it does.

    Args:
        module: whose forward is run.
        args: positional arguments.
        kwargs: keyword arguments.
        needs_grad: whether autograd records.
        within: further contexts, for forward alone.
    """
    made, outside = Made(), sys.exc_info()[1]
    with collections_put_off():
        try:
            with saved_without_circles():
                seen = _observe(module, args, kwargs, needs_grad, made, within)
        except BaseException as error:
            release_frames(error, outside)
            made.forget()
            raise
        return replace(seen, kept=made.forget())


def _observe(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    made: Made,
    within: Iterable[AbstractContextManager[Any]],
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
        outside = OutsideReads(module)
        forward = TailWatch(ArgumentWatch(module.forward), differentiated=needs_grad)
        with (
            made,
            ForeignTensors(beside) as foreign,
            ViewWatch() as views,
            QuestionWatch() as questions,
            others.noticing_new_ones(),
            outside.collecting(),
            ExitStack() as further,
        ):
            for each in within:
                further.enter_context(each)
            results, returned = pytree.tree_flatten(forward(*fake_args, **fake_kwargs))
        if torch.is_grad_enabled() != needs_grad:
            impure.append("leaves another gradient mode than it found")
        if not needs_grad and any(getattr(r, "grad_fn", None) is not None for r in results):
            impure.append("turns gradients on where they are off, for what it returns")
        read, after = set(reads), tensors_of(module)
        assigned = values_assigned(module, set(assignments))
        writes = written(before, snapshot(module))
        inputs = {i: t for i, t in enumerate(given) if isinstance(t, torch.Tensor)}
        sharing = aliases_of(results, inputs, after, views if needs_grad else None)
        if wrote(_all_tensors(module), versions, writable):
            impure.append("writes into a tensor that is neither an input nor a buffer")
        rebound = {n: t for n, t in state.items() if after.get(n, t) is not t}
        refuse_exchanged(rebound, results, sharing)
        strides = tuple(map(dense_strides, results))
        if any(isinstance(t, torch.Tensor) and t.is_inference() for t in results):
            questions.asks.add(Question.INFERENCE)
    impure += [*questions.complaints, *outside.complaints]
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
        outside=outside.values(),
        changes=outside.changed(),
        asks=frozenset(questions.asks | outside.asks),
        strides=strides,
    )


def _all_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The module's tensors, those in lists and dicts among its attributes too."""
    found = list(tensors_of(module).values())
    for owner in module.modules():
        for name, value in owner.__dict__.items():
            if name not in ("_parameters", "_buffers"):
                found += [t for t in contents(value) if isinstance(t, torch.Tensor)]
    return found


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    # Where no gradient is asked for, views of it say so too, and detached ones do not.
    return fake.requires_grad_() if value.requires_grad and not fake.is_inference() else fake
