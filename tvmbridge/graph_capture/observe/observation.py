"""Observation: run forward once on fake tensors before the capture, and record what it does.

The captured graph is a pure function. An observation records everything else: the attributes that
forward reads and writes, outputs that share memory, and random numbers from other generators than
PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.layouts import dense_strides
from tvmbridge.calls.standins import tensors_of, tensors_replaced
from tvmbridge.calls.views import ViewWatch
from tvmbridge.core.assumptions import OutsideValue, Question
from tvmbridge.core.autocast import Autocast, without_autocast
from tvmbridge.core.carried import places_in
from tvmbridge.core.contents import PartOf
from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.structure import unflatten
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import Left
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.aliasing import Sharing, aliases_of, refuse_exchanged, with_exchanged
from tvmbridge.graph_capture.observe import leaks
from tvmbridge.graph_capture.observe.adoption import Adoption
from tvmbridge.graph_capture.observe.attributes import (
    iterators_among,
    read_and_left,
    recorded_assignments,
    recorded_reads,
    values_assigned,
    values_read,
    with_marks_copied,
)
from tvmbridge.graph_capture.observe.effects import QuestionWatch, StateBefore, impurities
from tvmbridge.graph_capture.observe.fakes import Fakes, all_tensors, any_tagged, laid_out
from tvmbridge.graph_capture.observe.foreign import ForeignConstant, ForeignModules, ForeignTensors
from tvmbridge.graph_capture.observe.objects import NO_READS, ObjectReads
from tvmbridge.graph_capture.observe.outside import OutsideReads
from tvmbridge.graph_capture.observe.settings import settings_kept, warning_filters_kept
from tvmbridge.graph_capture.observe.undo import current_undo
from tvmbridge.graph_capture.trace.answers import known_values
from tvmbridge.graph_capture.trace.checkpoints import changed_in_checkpoints
from tvmbridge.graph_capture.trace.functions import functions_replaced
from tvmbridge.graph_capture.trace.held_numbers import held_by, numbers_marked
from tvmbridge.graph_capture.trace.old_norms import normed_weights, shared_with
from tvmbridge.graph_capture.trace.written_attention import weights_drawn_if_kept
from tvmbridge.graph_capture.traced_forward import TracedForward


@dataclass(frozen=True)
class Observation:
    """The reads, side effects and result structure of one run of forward.

    The keys of the mappings of attributes are (submodule's name, attribute's name).

    - ``values``: the attributes that forward reads, with the values that guards expect.
    - ``assigned``: the attributes that forward sets to a constant before it may read them.
    - ``writes``: dotted names of the attributes that forward changes.
    - ``structure``: the pytree structure of the results.
    - ``sharing``: the memory that the results share with inputs, the module or each other.
    - ``rebound``: the buffers that forward replaces by other tensors instead of writing into them,
      with the dense strides of the new tensors.
    - ``impure``: descriptions of other effects that compiled code would not repeat.
    - ``foreign``: the unregistered tensors that forward reads.
    - ``foreign_modules``: the unregistered modules with state that forward runs.
    - ``foreign_constants``: the constants that forward reads of unregistered modules.
    - ``kept``: whether a tensor that forward created outlives the call.
    - ``outside``: the values outside the module that forward reads.
    - ``changes``: labels of the values outside the module that forward changes.
    - ``asks``: the properties of tensors that forward reads, beside shapes and dtypes.
    - ``strides``: the dense strides of the results (see :func:`dense_strides`).
    - ``normed``: names of the weights that hooks of ``weight_norm`` or ``spectral_norm`` compute;
      ``writes`` does not have them.
    - ``objects``: the record of reads of plain objects.
    - ``left``: the attributes in which forward leaves a value at each call, and how; these values
      become further results.
    - ``executed``: the code of the user's functions that ran.
    - ``repeated``: dotted names of the attributes that a checkpointed function changes.
    """

    values: Mapping[tuple[str, str], Any]
    assigned: Mapping[tuple[str, str], Any]
    writes: tuple[str, ...]
    structure: pytree.TreeSpec
    sharing: Sharing
    rebound: Mapping[str, tuple[int, ...] | None]
    impure: tuple[str, ...]
    foreign: tuple[torch.Tensor, ...] = ()
    foreign_modules: tuple[nn.Module, ...] = ()
    foreign_constants: tuple[ForeignConstant, ...] = ()
    kept: bool = False
    outside: tuple[OutsideValue, ...] = ()
    changes: tuple[str, ...] = ()
    asks: frozenset[Question] = frozenset()
    strides: tuple[tuple[int, ...] | None, ...] = ()
    normed: tuple[str, ...] = ()
    objects: ObjectReads = NO_READS
    left: Mapping[tuple[str, str], Left] = field(default_factory=dict)
    executed: tuple[CodeType, ...] = ()
    repeated: tuple[str, ...] = ()


@weights_drawn_if_kept
def observe(
    module: nn.Module,
    arguments: Arguments,
    needs_grad: bool,
    within: Iterable[AbstractContextManager[Any]] = (),
    is_compiling: bool = True,
    autocast: Autocast = (),
    left: Sequence[tuple[str, str]] | None = (),
    adoption: Adoption | None = None,
) -> Observation:
    """Run forward on fake tensors with the shapes of the arguments, and record what it does.

    Args:
        within: further contexts, for forward alone.
        left: the attributes in which forward leaves values, as (submodule's name, attribute's
            name); None: the run finds them.
        adoption: collects the unregistered tensors that forward reads, even if this function
            raises.
    """
    adoption = Adoption() if adoption is None else adoption
    made, handled, objects = leaks.Made(), sys.exc_info()[1], ObjectReads()
    outside = OutsideReads(module, objects, needs_grad)
    with current_undo().run(), leaks.collections_put_off():
        try:
            with leaks.saved_without_circles():
                # No local variable may hold the fakes, since each tensor that is alive after the
                # run counts as kept by forward.
                forward = partial(
                    TracedForward,
                    module=module,
                    is_compiling=is_compiling,
                    differentiated=needs_grad,
                    autocast=autocast,
                    left=left,
                )
                watches = _Watches(made, outside, objects, adoption.found)
                run = partial(_observe, module, needs_grad, watches, within, forward)
                args, kwargs = arguments
                values = known_values(module, tuple(args), kwargs)
                seen = run(Fakes.of(module, tuple(args), kwargs), values)
        except BaseException as error:
            leaks.release_frames(error, handled)
            outside.remove_fakes()
            raise
        finally:
            adoption.watched = outside.values()
        kept = bool(made.alive())
        if kept or seen.changes:
            outside.remove_fakes()
        if kept:
            read = (*seen.values.values(), *(value.expected for value in seen.outside))
            leaks.refuse_hidden(made.alive(), module, read)
        return replace(seen, kept=kept)


class _Watches(NamedTuple):
    """The recorders that exist before the fakes of a run are created and after they are gone.

    - ``made``: weak references to all tensors that operators return.
    - ``outside``: reads of values outside the module.
    - ``objects``: reads of plain objects.
    - ``found``: the unregistered tensors that operators read, by their ids.
    """

    made: leaks.Made
    outside: OutsideReads
    objects: ObjectReads
    found: dict[int, torch.Tensor]


class _Run:
    """One run of a forward on fakes, with its recorders; created under the run's gradient mode."""

    def __init__(
        self,
        module: nn.Module,
        fakes: Fakes,
        foreign_modules: ForeignModules,
        forward: TracedForward,
        watches: _Watches,
    ) -> None:
        self.outside = watches.outside
        self._watches = watches
        self.foreign = ForeignTensors(fakes.beside, watches.found, fakes.mode)
        self.views = ViewWatch()
        self.questions = QuestionWatch()
        self.results: list[Any] = []
        self._left_changed: list[str] = []
        self._reshaped = self._switched = self._tagged = self._writes_entwined = False
        self._module = module
        self._fakes = fakes
        self.forward = forward
        self._foreign_modules = foreign_modules
        self._records = torch.is_grad_enabled()

    def run(self, within: Iterable[AbstractContextManager[Any]]) -> pytree.TreeSpec:
        """Run forward in the contexts ``within``; return the structure of its results."""
        args, kwargs = unflatten(self._fakes.given, self._fakes.structure)
        held = self._fakes.held.values()
        tensors = [t for t in (*self._fakes.given, *held) if isinstance(t, torch.Tensor)]
        versions = list(map(version_of, self._fakes.entwined))
        shapes, records = list(map(laid_out, tensors)), [t.requires_grad for t in tensors]
        with (
            self._watches.made,
            self.foreign,
            self.views,
            self.questions,
            self._foreign_modules.noticing_new_ones(),
            self._watches.objects.recording(self._module),
            self.outside.collecting(),
            settings_kept(self.outside.own.may_set) as settings,
            warning_filters_kept(self.outside.own) as filters_changed,
            ExitStack() as further,
        ):
            for each in within:
                further.enter_context(each)
            self.results, structure = pytree.tree_flatten(self.forward(*args, **kwargs))
            self._left_changed = settings.changed()
            if filters_changed():
                self._left_changed.append("the filters of warnings")
        self.foreign.note_results(self.results)
        self._reshaped = shapes != list(map(laid_out, tensors))
        # A write into a tensor may make it require a gradient, too, but then it is no leaf.
        self._switched = any(
            t.requires_grad != before and (before or t.is_leaf)
            for t, before in zip(tensors, records, strict=True)
        )
        self._switched |= any(
            isinstance(r, torch.Tensor) and r.is_leaf and r.requires_grad
            for r in (*self.results, *tensors_of(self._module).values())
            if id(r) in self.questions.started
        )
        self._writes_entwined = versions != list(map(version_of, self._fakes.entwined))
        self._tagged = any_tagged((*tensors, *self.results))
        if any(isinstance(r, torch.Tensor) and r.is_inference() for r in self.results):
            self.questions.asks.add(Question.INFERENCE)
        return structure

    def sharing(self, after: Mapping[str, torch.Tensor]) -> Sharing:
        """Return the memory that the results share."""
        if self._records:
            return aliases_of(self.results, self.given(), after, self.views)
        sharing = aliases_of(self.results, self.given(), after, None)
        # Code without a backward serves all calls under no_grad, whether or not tensors require a
        # gradient. So a result counts as detached if forward detaches it, whatever the sample has.
        aliases = [
            alias and replace(alias, detached=alias.detached or self.views.detaches(result))
            for alias, result in zip(sharing.aliases, self.results, strict=True)
        ]
        return replace(sharing, aliases=tuple(aliases))

    def given(self) -> dict[int, torch.Tensor]:
        """Return the tensors among the leaves of the arguments, by position."""
        return {i: t for i, t in enumerate(self._fakes.given) if isinstance(t, torch.Tensor)}

    def complaints(self) -> list[str]:
        """Return, after :meth:`run`, the uses of tensors and settings that code cannot repeat."""
        found = [f"leaves {name} changed" for name in self._left_changed]
        if self._reshaped:
            found.append("changes the shape or strides of an argument or a weight in place")
        if self._writes_entwined:
            found.append("writes into an argument that shares elements with another tensor")
        if self._switched:
            found.append("changes requires_grad of a tensor")
        if self._tagged:
            found.append("sets attributes of a tensor")
        recorded = any(getattr(r, "grad_fn", None) is not None for r in self.results)
        if recorded and not self._records:
            found.append("turns gradients on where they are off, for what it returns")
        found = list(dict.fromkeys((*found, *self.questions.complaints, *self.outside.complaints)))
        if not self._records:
            return found
        keys = self.forward.ways
        replaced = [self._module.get_submodule(path).__dict__.get(n) for path, n, *_ in keys]
        carried = {id(tensor) for value in replaced for _, tensor in places_in(value)}
        return found + self.foreign.without_gradient(carried)


def _observe(
    module: nn.Module,
    needs_grad: bool,
    watches: _Watches,
    within: Iterable[AbstractContextManager[Any]],
    traced: Callable[..., TracedForward],
    fakes: Fakes,
    known: Mapping[str, torch.Tensor],
) -> Observation:
    others = ForeignModules()
    with ExitStack() as stack:
        impure = stack.enter_context(impurities(watches.outside.own))
        reads = stack.enter_context(recorded_reads(module, others))
        assignments = stack.enter_context(recorded_assignments(module, reads, others))
        for context in (fakes.mode, torch.set_grad_enabled(needs_grad), without_autocast()):
            stack.enter_context(context)
        stack.enter_context(functions_replaced(module, on_fakes=True))
        stack.enter_context(tensors_replaced(module, fakes.held))
        # Fakes replace tensors in lists, tuples and dicts, but not in other objects, so forward may
        # write into the real tensors there.
        before = StateBefore(module, (*fakes.held.values(), *all_tensors(module)))
        for noted_so_far in (reads, assignments, others):
            noted_so_far.clear()
        run = _Run(module, fakes, others, traced(values=known, numbers=fakes.numbers), watches)
        structure = run.run(within)
        repeated = changed_in_checkpoints()
        inputs = held_by(module).values()
        if (fakes.numbers or inputs) and run.outside.types:
            asks = f"forward may ask for its class by `type`, in {run.outside.types[0]}"
            raise NumberReadError(asks, frozenset(fakes.numbers), frozenset(inputs))
        weights = normed_weights(module)
        read = reads - set(inputs)
        held = tensors_of(module, remove_duplicate=True)
        after = {name: t for name, t in held.items() if name not in weights}
        assigned, left = values_assigned(module, set(assignments)), run.forward.ways
        writes = before.written()
        normed = tuple(name for name in writes if name in weights)
        shared = shared_with(normed, module, run.results)
        if shared is not None:
            impure.append(f"returns {shared}, which a hook has made")
        sharing = run.sharing(after)
        impure.extend(before.writes_by_two_names())
        if run.foreign.written or before.has_written_other_tensors(all_tensors(module)):
            impure.append("writes into a tensor that is neither an input nor a buffer")
        rebound = before.rebound(after)
        refuse_exchanged(rebound, run.results, sharing)
        sharing = with_exchanged(sharing, rebound.keys(), run.given(), after)
        strides = tuple(map(dense_strides, run.results))
        exchanged = {name: dense_strides(after[name]) for name in rebound}
    # Forward does not depend on the earlier value of an attribute that it assigns first, or of a
    # number that it only adds to.
    read_first = {key for key in left if key in read and key not in assignments}
    read -= {key for key, way in left.items() if key in assignments or way.number is not None}
    with numbers_marked(module):
        values = values_read(module, read, watches.objects)
        if any(len(key) > 2 for key in inputs):
            values = with_marks_copied(values)
    impure += read_and_left(values, left, read_first, run.foreign.found.keys())
    values.update((key, PartOf(list, {})) for key, way in left.items() if way.into != "place")
    return Observation(
        values=values,
        assigned=assigned,
        writes=tuple(name for name in writes if name not in normed),
        structure=structure,
        sharing=sharing,
        rebound=exchanged,
        impure=(*dict.fromkeys(impure), *run.complaints(), *iterators_among(values)),
        foreign=tuple(run.foreign.found.values()),
        foreign_modules=tuple(others.stateful()),
        foreign_constants=tuple(others.constants_read()),
        outside=run.outside.values(),
        changes=(*run.outside.changed(), *others.changed()),
        asks=frozenset(run.questions.asks | run.outside.asks),
        strides=strides,
        normed=normed,
        objects=watches.objects,
        left=left,
        executed=tuple(run.outside.executed.values()),
        repeated=repeated,
    )
