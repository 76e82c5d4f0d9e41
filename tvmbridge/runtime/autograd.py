"""One autograd function over the compiled forward and backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.executable import Bound
from tvmbridge.compiler.packing import Packing
from tvmbridge.compiler.partial_backwards import all_finite, refuse_unusual
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.torch_private import backward_keeps_graph, saved_tensors_hooks_in_force
from tvmbridge.core.types import InputDescriptor, InputKind, OutputKind, TensorSpec
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.memory.layouts import Strides
from tvmbridge.graph_capture.surroundings import in_checkpoint
from tvmbridge.runtime.guards.watch import Watch, versions_of, watch
from tvmbridge.runtime.output_hooks import let_hooks_wait
from tvmbridge.runtime.second_order import SecondOrderCall, refuse
from tvmbridge.runtime.siblings import Watched, readers_of

_NO_GRADIENT_FOR_HOOK = (
    "a hook on {name} would be called without a gradient, where eager PyTorch does not call it: no "
    "output that this backward starts from depends on {name}. Remove the hook, use the output that "
    "does, or call remove_tvm_dispatch(module)"
)
_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: compiled code reads parameters and inputs in backward, and hooks on saved tensors "
    "kept them without a copy"
)

# Arguments of the autograd function that are no tensors.
_BEFORE_SOURCES = 1
_CALLED_ALONE = "the code was called alone"
_numbers = itertools.count(1)


class TrainingCall:
    """How to run forward and backward of a compiled module as one autograd function.

    Args:
        compiled: a module compiled with gradients.
        packing: where its packed weights are, which backward reads; None: there are none.
    """

    def __init__(self, compiled: CompiledModule, packing: Packing | None = None) -> None:
        parts = compiled.split
        assert parts is not None
        position = {name: i for i, name in enumerate(parts.primals)}
        self.compiled = compiled
        self.packing = nullcontext() if packing is None else packing
        self.parts = parts
        self.number = next(_numbers)
        self.reads = [position[name] for name in parts.reads]
        # Autograd notices writes by the version of a parameter, which its packed values lack.
        self.guarded = [
            i for i in _packed_into(compiled, set(self.reads)) if i not in set(self.reads)
        ]
        self.gradient_of = [position[name] for name in parts.wanted]
        self.num_primals = len(parts.primals)
        self.overwritten = _overwritten(compiled)
        self.constant_outputs = [
            i for i in range(parts.num_outputs) if i not in set(parts.cotangent_of)
        ]
        self.readers = readers_of(compiled.captured, parts.cotangent_of)
        computed = [o for o in compiled.captured.outputs if o.is_computed]
        self.cotangent_specs = [computed[i].spec for i in parts.cotangent_of]
        self.orders = {
            n: layout.order for n, layout in compiled.layouts.outputs.items() if layout.moves
        }

    def __call__(
        self,
        primals: Sequence[Any],
        strides: Strides = None,
        again: SecondOrderCall | str = _CALLED_ALONE,
        held: Held | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of forward, connected to ``primals`` (inputs, state and noise, in order).

        ``strides`` are those that the outputs get at this call; None: those of the sample's.
        ``again`` gives gradients that can be differentiated, or says why there are none. ``held``
        has the tensors of the module as compiled code takes them.
        """
        step = _Step(self, primals, strides, again, held)
        sources = [primals[i] for i in self.gradient_of]
        results: tuple[torch.Tensor, ...] = _CompiledFunction.apply(step, *sources)  # type: ignore[no-untyped-call]
        step.primals = ()
        if len(self.parts.cotangent_of) > 1:
            let_hooks_wait(results[i] for i in self.parts.cotangent_of)
        node = results[self.parts.cotangent_of[0]].grad_fn if self.readers else None
        if node is not None:
            node.watched = Watched(results, self.readers)  # type: ignore[attr-defined]
        return results

    def hold(self, primals: Mapping[int, torch.Tensor], as_they_are: Sequence[int]) -> Held:
        """Convert ``primals`` that stay the same from call to call, by position, once.

        They are all tensors of the module, and its packed weights. Those at ``as_they_are`` are
        known to be readable by compiled code at each call.
        """
        parts, loaded = self.parts, self.compiled.loaded
        forward = loaded.bind("forward", primals, self.num_primals, as_they_are)
        rereads = {
            i: primals[p]
            for i, p in enumerate(self.reads)
            if p in primals and p not in self.overwritten
        }
        first = len(self.reads) + len(parts.kept_outputs)
        count = first + len(parts.residuals) + len(parts.cotangent_of)
        as_they_are = [first + number for number in parts.computed_residuals]
        backward = loaded.bind("backward", rereads, count, as_they_are)
        saved = [i for i in range(len(self.reads)) if backward.values[i] is None]
        read = [self.reads[i] for i in rereads if i not in saved] + self.guarded
        # Packed weights, the last primals, have no versions of their own.
        count = self.num_primals - len(self.compiled.packs)
        watched = tuple(primals[p] for p in read if p < count)
        there = {i: primals[self.reads[i]] for i in rereads if i not in saved}
        return Held(forward, backward, saved, there, watched, watch((), (), watched))

    def marks(self) -> tuple[torch.Tensor, ...]:
        """What is saved first in a checkpoint, so that nothing else is taken for this code's.

        A checkpoint puts what its repetition saves in place of what was saved, by position and
        shape. Where forward itself or other code runs the repetition, this shape differs.
        """
        if not in_checkpoint():
            return ()
        return (torch.empty((0, self.number), dtype=torch.bool, device="cpu"),)

    def kept_primal(self, primals: Sequence[torch.Tensor], position: int) -> torch.Tensor:
        """A primal that backward reads; a copy where it is written into meanwhile."""
        primal = primals[position]
        return primal.clone() if position in self.overwritten else primal


def _primals(compiled: CompiledModule) -> list[InputDescriptor]:
    """The primals, but for packed weights, which are the last ones."""
    return [d for d in compiled.captured.inputs if d.kind is not InputKind.CONSTANT]


def _packed_into(compiled: CompiledModule, reads: set[int]) -> list[int]:
    """Positions of the parameters whose packed values are among the primals ``reads``."""
    assert compiled.split is not None
    position = {
        d.target: i for i, d in enumerate(_primals(compiled)) if d.kind is InputKind.PARAMETER
    }
    first = len(compiled.split.primals) - len(compiled.packs)
    packs = (names for i, names in enumerate(compiled.packs, start=first) if i in reads)
    return [position[name] for names in packs for name in names]


def _overwritten(compiled: CompiledModule) -> frozenset[int]:
    """Positions of the primals that are written into after forward: statistics, arguments."""
    captured = compiled.captured
    written = {(o.kind, o.target) for o in captured.outputs if o.kind is not OutputKind.USER}
    return frozenset(
        i
        for i, d in enumerate(_primals(compiled))
        if (OutputKind.INPUT_MUTATION, d.name) in written
        or (d.kind is InputKind.BUFFER and (OutputKind.BUFFER_MUTATION, d.target) in written)
    )


@dataclass(frozen=True)
class Held:
    """The tensors of a module, converted for compiled code once.

    ``saved`` are the numbers of what backward reads that is not among them, ``there`` those that
    are, by number. Autograd is not told of the latter: ``watched`` are those whose versions must
    not change until backward has run, and ``addresses`` tells whether their memory is the same.
    """

    forward: Bound
    backward: Bound
    saved: Sequence[int]
    there: Mapping[int, torch.Tensor]
    watched: tuple[torch.Tensor, ...]
    addresses: Watch


class _Step:
    """One call of forward, and what its backward has to know of it."""

    def __init__(
        self,
        call: TrainingCall,
        primals: Sequence[Any],
        strides: Strides,
        again: SecondOrderCall | str,
        held: Held | None,
    ) -> None:
        self.call = call
        self.primals = primals
        self.strides = strides
        self.again = again
        self.held = held
        self.marks: tuple[torch.Tensor, ...] = ()
        self.versions: tuple[int, ...] = ()
        # Autograd does not ask for the versions of what hooks keep, which may be what they got.
        self.signs: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def run(self) -> list[torch.Tensor]:
        """The results of forward: outputs and residuals."""
        bound = None if self.held is None else self.held.forward
        return self.call.compiled.forward(self.primals, self.strides, bound)

    def saved(self) -> list[torch.Tensor]:
        """The primals that autograd saves for backward, before outputs and residuals."""
        call, held = self.call, self.held
        if held is not None:
            self.versions = versions_of(held.watched)
            return [call.kept_primal(self.primals, call.reads[i]) for i in held.saved]
        read = [call.kept_primal(self.primals, i) for i in call.reads]
        if saved_tensors_hooks_in_force(True) is not None:
            self.marks = call.marks()
            self.signs = [(weakref.ref(t), version_of(t)) for t in read]
        return [*self.marks, *read]

    def guards(self) -> list[torch.Tensor]:
        """Primals that are saved so that autograd notices writes into them."""
        return [] if self.held is not None else [self.primals[i] for i in self.call.guarded]

    def restored(self, saved: Sequence[torch.Tensor]) -> list[Any]:
        """What backward reads before the cotangents, of what autograd has saved.

        Raises:
            RuntimeError: a tensor that backward reads was written since forward.
        """
        call, held = self.call, self.held
        if held is None:
            read = list(saved[len(self.marks) : len(saved) - len(call.guarded)])
            _refuse_written(read, self.signs)
            return read
        if versions_of(held.watched) != self.versions:
            raise RuntimeError(_WRITTEN)
        count = len(held.saved)
        values: list[Any] = [None] * len(call.reads)
        for i, value in zip(held.saved, saved[:count], strict=True):
            values[i] = value
        for i, tensor in held.there.items():
            values[i] = tensor
        return [*values, *saved[count:]]

    def bound(self) -> Bound | None:
        """What backward reads as it was converted once; None: its addresses may be others now."""
        held = self.held
        return held.backward if held is not None and held.addresses.unchanged() else None


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = step.call.parts
        results = step.run()
        outputs, residuals = results[: parts.num_outputs], results[parts.num_outputs :]
        kept = [outputs[number] for number, _ in parts.kept_outputs]
        ctx.step = step
        ctx.watched = None
        # Not saved for backward: it reads none of them, and they may be written into meanwhile.
        ctx.sources = sources
        ctx.save_for_backward(*step.saved(), *kept, *residuals, *step.guards())
        if step.call.constant_outputs:
            ctx.mark_non_differentiable(*[outputs[i] for i in step.call.constant_outputs])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step: _Step = ctx.step
        refuse_unusual(cotangents)
        if ctx.watched is not None:
            ctx.watched.refuse_hooks(cotangents)
        if torch.is_grad_enabled():
            return (None, *_backward_to_differentiate(ctx, cotangents))
        with step.call.packing:
            gradients = _run_backward(step, step.restored(ctx.saved_tensors), cotangents)
        if any(gradient is None for gradient in gradients):
            _refuse_hooks_without_gradient(ctx, gradients)
        if not backward_keeps_graph():
            ctx.sources, step.again = (), "backward has run"
        return (None, *gradients)


def _backward_to_differentiate(
    ctx: Any, cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradients where backward is recorded itself (``create_graph=True``).

    They are those of the module's own forward, run again; where that cannot be, those of compiled
    code, which raise when they are differentiated.
    """
    step: _Step = ctx.step
    with torch.no_grad():
        saved = ctx.saved_tensors
    again = step.again
    reason = again if isinstance(again, str) else again.refused(_wanted(ctx))
    if reason is None:
        gradients = _recorded_gradients(ctx, cotangents)
    else:
        with torch.no_grad(), step.call.packing:
            gradients = _run_backward(step, step.restored(saved), cotangents)
    if any(gradient is None for gradient in gradients):
        _refuse_hooks_without_gradient(ctx, gradients)
    if reason is None:
        return gradients
    arrived = [c for c in cotangents if c is not None]
    return refuse(gradients, [*ctx.sources, *arrived], reason)


def _recorded_gradients(
    ctx: Any, cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Gradients that can be differentiated, in the order of those of compiled code."""
    wanted = _wanted(ctx)
    arrived = {i: c for i, c in enumerate(cotangents) if c is not None}
    found = dict(zip(wanted, ctx.step.again.gradients(wanted, arrived), strict=True))
    return [found.get(position) for position in ctx.step.call.gradient_of]


def _wanted(ctx: Any) -> list[int]:
    """The primals that the compiled code has gradients of and this backward wants them of."""
    asked = ctx.needs_input_grad[_BEFORE_SOURCES:]
    return [p for p, needed in zip(ctx.step.call.gradient_of, asked, strict=True) if needed]


def _refuse_written(
    saved: Sequence[torch.Tensor], signs: Sequence[tuple[weakref.ref[torch.Tensor], int]]
) -> None:
    """Refuse what is the memory of a tensor that was written since forward."""
    for tensor, (reference, version) in zip(saved, signs, strict=False):
        original = reference()
        if original is None or version_of(original) == version:
            continue
        if original.data_ptr() == tensor.data_ptr():
            raise RuntimeError(_WRITTEN)


def _run_backward(
    step: _Step, values: list[Any], cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradients; None where eager gives none, rather than zeros: optimizers skip these."""
    call = step.call
    parts, partial = call.parts, call.compiled.partial_backwards
    for i, (number, shape) in enumerate(parts.kept_outputs, start=len(call.reads)):
        order = call.orders.get(number)
        values[i] = values[i].reshape(shape) if order is None else values[i].permute(order)
    arriving = [cotangents[number] for number in parts.cotangent_of]
    absent = frozenset(i for i, c in enumerate(arriving) if c is None)
    specs = zip(arriving, call.cotangent_specs, strict=True)
    filled = [_zeros(s) if c is None or c._is_zerotensor() else c for c, s in specs]
    if call.orders:
        orders = [call.orders.get(number) for number in parts.cotangent_of]
        filled = [c if o is None else c.permute(o) for c, o in zip(filled, orders, strict=True)]
    bound = step.bound()
    if not absent:
        return call.compiled.backward([*values, *filled], bound)
    assert partial is not None
    flowing = [bool(reads - absent) for reads in parts.gradient_reads]
    if not any(flowing):
        return [None] * len(flowing)
    backward = partial.known(absent)
    if backward is None:
        gradients = call.compiled.backward([*values, *filled], bound)
        if all_finite([g for g, flows in zip(gradients, flowing, strict=True) if flows]):
            return [g if flows else None for g, flows in zip(gradients, flowing, strict=True)]
        backward = partial.without(absent)
    values += [c for i, c in enumerate(filled) if i not in absent]
    return backward(values, len(flowing))


def _refuse_hooks_without_gradient(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse what autograd would do with primals that no gradient reaches: call their hooks."""
    call: TrainingCall = ctx.step.call
    needed = ctx.needs_input_grad[_BEFORE_SOURCES:]
    sources = zip(call.gradient_of, ctx.sources, gradients, needed, strict=False)
    for position, source, gradient, wanted in sources:
        if gradient is not None or not wanted:
            continue
        if source._backward_hooks or getattr(source, "_post_accumulate_grad_hooks", None):
            descriptor = _primals(call.compiled)[position]
            name = descriptor.target or descriptor.name
            raise BridgeError(_NO_GRADIENT_FOR_HOOK.format(name=name))


def _zeros(spec: TensorSpec | None) -> torch.Tensor:
    assert spec is not None
    return spec.empty().zero_()
