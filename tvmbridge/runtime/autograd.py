"""One autograd function over the compiled forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.partial_backwards import all_finite, refuse_unusual
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.called_in_mode import with_autocast_off, without_gradients
from tvmbridge.core.profiling import region
from tvmbridge.core.torch_private import backward_keeps_graph
from tvmbridge.core.types import TensorSpec
from tvmbridge.graph_capture.memory.layouts import Strides
from tvmbridge.graph_capture.surroundings import in_checkpoint
from tvmbridge.runtime.cuda_graphs import Replayed
from tvmbridge.runtime.guards.watch import watch
from tvmbridge.runtime.output_hooks import let_hooks_wait
from tvmbridge.runtime.primals import overwritten_by, packed_into, picker, refuse_hooks
from tvmbridge.runtime.saved_versions import SavedVersions
from tvmbridge.runtime.second_order import SecondOrderCall, refuse
from tvmbridge.runtime.siblings import Watched, readers_of
from tvmbridge.runtime.step import Held, TrainingStep

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

    def __init__(self, compiled: CompiledModule, packing: ModulePacks | None = None) -> None:
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
            i for i in packed_into(compiled, set(self.reads)) if i not in set(self.reads)
        ]
        self.gradient_of = [position[name] for name in parts.wanted]
        self.sources_of = picker(self.gradient_of)
        self.num_primals = len(parts.primals)
        self.place_of_residuals = len(self.reads) + len(parts.kept_outputs)
        self.overwritten = overwritten_by(compiled)
        computed = [o for o in compiled.captured.outputs if o.is_computed]
        self.orders = {
            n: layout.order for n, layout in compiled.layouts.outputs.items() if layout.moves
        }
        # Outputs that backward reads in another shape, or another order.
        self.reshaped = [
            (i, number, shape)
            for i, (number, shape) in enumerate(parts.kept_outputs, start=len(self.reads))
            if number in self.orders or shape != getattr(computed[number].spec, "shape", None)
        ]
        self.constant_outputs = [
            i for i in range(parts.num_outputs) if i not in set(parts.cotangent_of)
        ]
        self.readers = readers_of(compiled.captured, parts.cotangent_of)
        self.versions = SavedVersions(compiled, self.reads, self.overwritten)
        self.cotangent_specs = [computed[i].spec for i in parts.cotangent_of]

    def __call__(
        self,
        primals: Sequence[Any],
        strides: Strides = None,
        again: SecondOrderCall | str = _CALLED_ALONE,
        held: Held | None = None,
        replayed: Replayed | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of forward, connected to ``primals`` (inputs, state and noise, in order).

        ``strides`` are those that the outputs get at this call; None: those of the sample's.
        ``again`` gives gradients that can be differentiated, or says why there are none. ``held``
        has the tensors of the module as compiled code takes them. ``replayed`` is what a CUDA graph
        made already.
        """
        step = TrainingStep(self, primals, strides, again, held, replayed)
        sources = self.sources_of(primals)
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
        count = self.place_of_residuals + 1 + len(parts.cotangent_of)
        backward = loaded.bind("backward", rereads, count, [self.place_of_residuals])
        there = [
            None if v is None else rereads[i]
            for i, v in enumerate(backward.values[: len(self.reads)])
        ]
        saved = [i for i, tensor in enumerate(there) if tensor is None]
        read = [p for p, t in zip(self.reads, there, strict=True) if t is not None] + self.guarded
        # Packed weights, the last primals, have no versions of their own.
        count = self.num_primals - len(self.compiled.packs)
        watched = {p: primals[p] for p in read if p < count}
        addresses = watch((), (), tuple(watched.values()))
        watched |= {p: primals[p] for p in self.versions.parameters if p in primals}
        readers = tuple(map(self.versions.readers_of_primal, watched))
        return Held(forward, backward, saved, there, tuple(watched.values()), readers, addresses)

    def as_read(self, values: list[Any]) -> list[Any]:
        """``values`` that backward reads before the cotangents, kept outputs as it takes them."""
        for i, number, shape in self.reshaped:
            order = self.orders.get(number)
            values[i] = values[i].reshape(shape) if order is None else values[i].permute(order)
        return values

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


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: TrainingStep, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *outputs, residuals = step.run()
        ctx.step = step
        ctx.watched = None
        # Not saved for backward: it reads none of them, and they may be written into meanwhile.
        ctx.sources = sources
        ctx.save_for_backward(*step.to_save(outputs, residuals))
        if step.call.constant_outputs:
            ctx.mark_non_differentiable(*[outputs[i] for i in step.call.constant_outputs])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if autocast_now():  # eager PyTorch's formulas would have the dtypes of forward as well
            return with_autocast_off(_CompiledFunction.backward, ctx, *cotangents)
        step: TrainingStep = ctx.step
        refuse_unusual(cotangents)
        if ctx.watched is not None:
            ctx.watched.refuse_hooks(cotangents)
        if torch.is_grad_enabled():
            differentiable = _backward_to_differentiate(ctx, cotangents)
            if not backward_keeps_graph():
                step.free()
            return (None, *differentiable)
        gradients = _gradients(step, ctx.saved_tensors, cotangents)
        if any(c is None for c in cotangents):
            _refuse_hooks(ctx, gradients)
        if not backward_keeps_graph():
            ctx.sources = ()
            step.forget()
        return (None, *gradients)


def _backward_to_differentiate(
    ctx: Any, cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradients where backward is recorded itself (``create_graph=True``).

    They are those of the module's own forward, run again; where that cannot be, those of compiled
    code, which raise when they are differentiated.
    """
    step: TrainingStep = ctx.step
    saved = without_gradients(getattr, ctx, "saved_tensors")
    step.refuse_written(cotangents)
    again = step.again
    reason = again if isinstance(again, str) else again.refused(_wanted(ctx))
    if reason is None:
        gradients = _recorded_gradients(ctx, cotangents)
    else:
        gradients = without_gradients(_gradients, step, saved, cotangents)
    if any(gradient is None for gradient in gradients):
        _refuse_hooks(ctx, gradients)
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


def _refuse_hooks(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    call: TrainingCall = ctx.step.call
    wanted = ctx.needs_input_grad[_BEFORE_SOURCES:]
    refuse_hooks(call.compiled, call.gradient_of, ctx.sources, gradients, wanted)


def _gradients(
    step: TrainingStep, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradients, of what autograd has saved."""
    step.refuse_written(cotangents)
    with region(f"{step.call.compiled.origin} backward"):
        held = step.unchanged()
        if held is not None:  # it keeps memory alive that parameters are moved from
            return _run_backward(step, step.restored(saved), cotangents, held)
        with step.call.packing:
            return _run_backward(step, step.restored(saved), cotangents, None)


def _run_backward(
    step: TrainingStep,
    values: list[Any],
    cotangents: Sequence[torch.Tensor | None],
    held: Held | None,
) -> Sequence[torch.Tensor | None]:
    """The gradients; None where eager gives none, rather than zeros: optimizers skip these."""
    call = step.call
    parts, partial = call.parts, call.compiled.partial_backwards
    values = call.as_read(values)
    arriving = [cotangents[number] for number in parts.cotangent_of]
    absent = frozenset(i for i, c in enumerate(arriving) if c is None)
    specs = zip(arriving, call.cotangent_specs, strict=True)
    filled = [_zeros(s) if c is None or c._is_zerotensor() else c for c, s in specs]
    if call.orders:
        orders = [call.orders.get(number) for number in parts.cotangent_of]
        filled = [c if o is None else c.permute(o) for c, o in zip(filled, orders, strict=True)]
    bound = None if held is None else held.backward
    if not absent:
        gradients = None if held is None or step.lease is None else step.lease.backward(filled)
        return call.compiled.backward([*values, *filled], bound) if gradients is None else gradients
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
    arrived = [c for i, c in enumerate(filled) if i not in absent]
    if held is not None and step.lease is not None:
        results = step.lease.backward(arrived, backward)
        if results is not None:
            return backward.placed(results, len(flowing))
    values += arrived
    if held is not None:
        bound = held.for_partial(backward.loaded, len(values), [call.place_of_residuals])
    return backward(values, len(flowing), bound)


def _zeros(spec: TensorSpec | None) -> torch.Tensor:
    assert spec is not None
    return spec.empty().zero_()
