"""An autograd function that runs the compiled forward and the compiled backward."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.calls.surroundings import in_checkpoint
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.partial_backwards import all_finite, refuse_unusual
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.called_in_mode import with_autocast_off, without_gradients
from tvmbridge.core.profiling import region
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import backward_keeps_graph
from tvmbridge.core.types import TensorSpec
from tvmbridge.runtime.cuda_graphs import Replayed
from tvmbridge.runtime.gradient_parts import GradientParts, Handed, link_of, linked
from tvmbridge.runtime.guards.watch import watch
from tvmbridge.runtime.halves import BackwardHalves
from tvmbridge.runtime.output_hooks import let_hooks_wait
from tvmbridge.runtime.primals import overwritten_by, packed_into, picker, refuse_hooks
from tvmbridge.runtime.saved_versions import SavedVersions
from tvmbridge.runtime.second_order import SecondOrderCall, refuse
from tvmbridge.runtime.siblings import Watched
from tvmbridge.runtime.step import ConvertedTensors, TrainingStep

# The number of arguments of the autograd function before its tensors.
_BEFORE_SOURCES = 2
_CALLED_ALONE = Reason(Kind.AGAIN_ALONE)
_numbers = itertools.count(1)


class TrainingCall:
    """Runs the forward and backward of a compiled module as one autograd function.

    Args:
        compiled: a module compiled with gradients.
        packing: the module's packed weights, which backward reads; None: there are none.
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
        # Backward reads packed values of these parameters. Autograd sees writes by a tensor's
        # version, which packed values do not have, so the parameters are saved as well.
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
        # Outputs that backward reads in another shape or order of dimensions than forward returns.
        self.reshaped = [
            (i, number, shape)
            for i, (number, shape) in enumerate(parts.kept_outputs, start=len(self.reads))
            if number in self.orders or shape != getattr(computed[number].spec, "shape", None)
        ]
        self.constant_outputs = [
            i for i in range(parts.num_outputs) if i not in set(parts.cotangent_of)
        ]
        self.readers = compiled.siblings
        self.versions = SavedVersions(compiled, self.reads, self.overwritten)
        self.halves = BackwardHalves.of(compiled, self.gradient_of)
        self.cotangent_specs = [computed[i].spec for i in parts.cotangent_of]
        self.gradient_parts = GradientParts(compiled)
        # How often the whole backward ran without a CUDA graph.
        self.backwards = 0

    @property
    def half_runs(self) -> Mapping[str, int]:
        """How often the code of each half of backward ran; see :class:`BackwardHalves`."""
        return {} if self.halves is None else self.halves.runs

    def __call__(
        self,
        primals: Sequence[Any],
        strides: Strides = None,
        again: SecondOrderCall | Reason = _CALLED_ALONE,
        held: ConvertedTensors | None = None,
        replayed: Replayed | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of forward, connected to ``primals`` in autograd's graph.

        Args:
            primals: user inputs, module state, random draws and packed weights, in order.
            strides: the strides of the outputs at this call; None: the strides of the sample.
            again: computes gradients that can be differentiated, or says why there are none.
            held: the module's tensors, converted for compiled code; None: not converted yet.
            replayed: the results of a CUDA graph that has replayed forward; None: run forward.
        """
        step = TrainingStep(self, primals, strides, again, held, replayed)
        sources, link = self.sources_of(primals), None
        step.parts = self.gradient_parts.now()
        if step.parts:
            step.sources = sources
            link = linked(step.parts, sources, self.compiled.captured.device)
            sources = [sources[i] for i in step.parts[0].gradients]
        results: tuple[torch.Tensor, ...] = _CompiledFunction.apply(step, link, *sources)  # type: ignore[no-untyped-call]
        step.primals = ()
        if len(self.parts.cotangent_of) > 1:
            let_hooks_wait(results[i] for i in self.parts.cotangent_of)
        node = results[self.parts.cotangent_of[0]].grad_fn if self.readers else None
        if node is not None:
            node.watched = Watched(results, self.readers)  # type: ignore[attr-defined]
        return results

    def hold(
        self, primals: Mapping[int, torch.Tensor], as_they_are: Sequence[int]
    ) -> ConvertedTensors:
        """Convert the primals that stay the same from call to call, once for all calls.

        Args:
            primals: by position, all tensors of the module and its packed weights.
            as_they_are: positions of primals that compiled code can read without a copy.
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
        read = [
            None if v is None else rereads[i]
            for i, v in enumerate(backward.values[: len(self.reads)])
        ]
        saved = [i for i, tensor in enumerate(read) if tensor is None]
        places = [p for p, t in zip(self.reads, read, strict=True) if t is not None]
        places += self.guarded
        # Packed weights are the last primals, and have no versions of their own.
        count = self.num_primals - len(self.compiled.packs)
        watched = {p: primals[p] for p in places if p < count}
        addresses = watch((), (), tuple(watched.values()))
        watched |= {p: primals[p] for p in self.versions.parameters if p in primals}
        readers = tuple(map(self.versions.readers_of_primal, watched))
        return ConvertedTensors(
            forward, backward, saved, read, tuple(watched.values()), readers, addresses
        )

    def as_read(self, values: list[Any]) -> list[Any]:
        """Bring kept outputs among ``values`` into the shapes and orders that backward reads.

        ``values`` are the arguments of backward before the cotangents; the list is changed.
        """
        for i, number, shape in self.reshaped:
            order = self.orders.get(number)
            values[i] = values[i].reshape(shape) if order is None else values[i].permute(order)
        return values

    def filled(self, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the cotangents that backward takes, in the orders that it reads; zeros for None.

        Args:
            cotangents: one for each output, None if it did not arrive.
        """
        numbers = self.parts.cotangent_of
        specs = zip((cotangents[number] for number in numbers), self.cotangent_specs, strict=True)
        filled = [_zeros(s) if c is None or c._is_zerotensor() else c for c, s in specs]
        if not self.orders:
            return filled
        orders = [self.orders.get(number) for number in numbers]
        return [c if o is None else c.permute(o) for c, o in zip(filled, orders, strict=True)]

    def marks(self) -> tuple[torch.Tensor, ...]:
        """Return a marker tensor to save first inside a checkpoint; nothing outside of one.

        A checkpoint repeats forward, and replaces each saved tensor by the one that the repetition
        saves at the same position with the same shape. The marker's shape is unique to this code,
        so a repetition that runs forward itself or other code is noticed.
        """
        if not in_checkpoint():
            return ()
        return (torch.empty((0, self.number), dtype=torch.bool, device="cpu"),)

    def kept_primal(self, primals: Sequence[torch.Tensor], position: int) -> torch.Tensor:
        """Return a primal that backward reads, as a copy if the call itself writes into it."""
        primal = primals[position]
        return primal.clone() if position in self.overwritten else primal


class _CompiledFunction(torch.autograd.Function):
    """The autograd node of one call of compiled code; ``step`` holds the state of the call."""

    @staticmethod
    def forward(
        ctx: Any, step: TrainingStep, link: torch.Tensor | None, *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        *outputs, residuals = step.run()
        ctx.step = step
        ctx.watched = None
        # Not saved for backward: backward does not read their values, and a write into them must
        # not raise.
        ctx.sources = step.sources if step.parts else sources
        ctx.save_for_backward(*step.to_save(outputs, residuals))
        if step.call.constant_outputs:
            ctx.mark_non_differentiable(*[outputs[i] for i in step.call.constant_outputs])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if autocast_now():  # backward runs in the dtypes of forward, as in eager PyTorch
            return with_autocast_off(_CompiledFunction.backward, ctx, *cotangents)
        step: TrainingStep = ctx.step
        refuse_unusual(cotangents)
        if ctx.watched is not None:
            ctx.watched.refuse_hooks(cotangents)
        if torch.is_grad_enabled():
            differentiable = _backward_to_differentiate(ctx, cotangents)
            if not backward_keeps_graph():
                step.free()
            return _handed_out(ctx, differentiable, None)
        halves, handed = step.halves, None
        if halves is None or step.parts:
            gradients, handed = _whole_gradients(ctx, cotangents)
        else:
            gradients = halves.gradients(
                ctx, cotangents, lambda: _whole_gradients(ctx, cotangents)[0]
            )
        results = _handed_out(ctx, gradients, handed)
        if not backward_keeps_graph():
            ctx.sources = step.sources = ()
            if handed is None:
                step.forget()
        return results


def _handed_out(
    ctx: Any, gradients: Sequence[torch.Tensor | None], handed: Handed | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients for autograd; with parts, the first part's and the link to the next.

    ``handed`` is None if all ``gradients`` are computed. Otherwise they are those of the first
    part.
    """
    step: TrainingStep = ctx.step
    if not step.parts:
        return (None, None, *gradients)
    if handed is None:
        handed = Handed(step, [], (), gradients)
        gradients = [gradients[i] for i in step.parts[0].gradients]
    return (None, link_of(step.call.compiled.captured.device, handed), *gradients)


def _whole_gradients(
    ctx: Any, cotangents: Sequence[torch.Tensor | None]
) -> tuple[Sequence[torch.Tensor | None], Handed | None]:
    """Return all gradients, or those of the first part and what the next part needs."""
    gradients, handed = _gradients(ctx, ctx.saved_tensors, cotangents)
    if any(c is None for c in cotangents):
        _refuse_hooks(ctx, gradients)
    return gradients, handed


def _backward_to_differentiate(
    ctx: Any, cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of a backward that autograd records (``create_graph=True``).

    The module's own forward runs again, and autograd differentiates it. If it cannot run again,
    the gradients come from compiled code, and raise when they are differentiated.
    """
    step: TrainingStep = ctx.step
    saved = without_gradients(getattr, ctx, "saved_tensors")
    step.refuse_written(cotangents)
    again = step.again
    reason = again if isinstance(again, Reason) else again.refused(_wanted(ctx))
    if reason is None:
        gradients = _recorded_gradients(ctx, cotangents)
    else:
        gradients = without_gradients(_all_gradients, ctx, saved, cotangents)
    if any(gradient is None for gradient in gradients):
        _refuse_hooks(ctx, gradients)
    if reason is None:
        return gradients
    arrived = [c for c in cotangents if c is not None]
    return refuse(gradients, [*ctx.sources, *arrived], reason)


def _recorded_gradients(
    ctx: Any, cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return gradients that can be differentiated, in the order of the compiled backward."""
    wanted = _wanted(ctx)
    arrived = {i: c for i, c in enumerate(cotangents) if c is not None}
    found = dict(zip(wanted, ctx.step.again.gradients(wanted, arrived), strict=True))
    return [found.get(position) for position in ctx.step.call.gradient_of]


def _wanted(ctx: Any) -> list[int]:
    """Return the positions of the primals whose gradients this backward wants."""
    return [p for p, needed in zip(ctx.step.call.gradient_of, _asked(ctx), strict=True) if needed]


def _asked(ctx: Any) -> Sequence[bool]:
    """Return, for each gradient, whether the source requires one."""
    if ctx.step.parts:
        return [True] * len(ctx.step.call.gradient_of)
    asked: Sequence[bool] = ctx.needs_input_grad[_BEFORE_SOURCES:]
    return asked


def _refuse_hooks(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    call: TrainingCall = ctx.step.call
    refuse_hooks(call.compiled, call.gradient_of, ctx.sources, gradients, _asked(ctx))


def _gradients(
    ctx: Any, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> tuple[Sequence[torch.Tensor | None], Handed | None]:
    """Run the compiled backward on the tensors that autograd has saved; return the gradients.

    If backward runs in parts, return the gradients of the first part, and the rest of backward.
    """
    step: TrainingStep = ctx.step
    parts = step.call.parts
    if not step.parts or any(cotangents[number] is None for number in parts.cotangent_of):
        return _all_gradients(ctx, saved, cotangents), None
    step.refuse_written(cotangents)
    with region(f"{step.call.compiled.origin} backward, part 0"):
        filled = step.call.filled(cotangents)
        handed = Handed(step, step.call.as_read(step.restored(saved)), ctx.sources)
        held = step.unchanged()
        if held is not None:
            return handed.first(filled, held), handed
        with step.call.packing:
            return handed.first(filled, None), handed


def _all_gradients(
    ctx: Any, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Run the whole compiled backward; return all gradients."""
    step: TrainingStep = ctx.step
    step.refuse_freed()
    step.refuse_written(cotangents)
    with region(f"{step.call.compiled.origin} backward"):
        held = step.unchanged()
        if held is not None:  # it keeps the old memory of parameters that are moved meanwhile
            return _run_backward(step, step.restored(saved), cotangents, held)
        with step.call.packing:
            return _run_backward(step, step.restored(saved), cotangents, None)


def _run_backward(
    step: TrainingStep,
    values: list[Any],
    cotangents: Sequence[torch.Tensor | None],
    held: ConvertedTensors | None,
) -> Sequence[torch.Tensor | None]:
    """Run backward; return the gradients.

    A gradient is None if no cotangent reaches it, as in eager PyTorch: optimizers skip a parameter
    without a gradient, but would apply zeros.
    """
    call = step.call
    parts, partials = call.parts, call.compiled.partial_backwards
    values = call.as_read(values)
    numbers = enumerate(parts.cotangent_of)
    absent = frozenset(i for i, number in numbers if cotangents[number] is None)
    filled = call.filled(cotangents)
    bound = None if held is None else held.backward
    if not absent:
        gradients = None if held is None or step.lease is None else step.lease.backward(filled)
        if gradients is None:
            gradients = call.compiled.backward([*values, *filled], bound)
            call.backwards += 1
        return gradients
    assert partials is not None
    flowing = [bool(reads - absent) for reads in parts.gradient_reads]
    if not any(flowing):
        return [None] * len(flowing)
    backward = partials.known(absent)
    if backward is None:
        gradients = call.compiled.backward([*values, *filled], bound)
        if all_finite([g for g, flows in zip(gradients, flowing, strict=True) if flows]):
            return [g if flows else None for g, flows in zip(gradients, flowing, strict=True)]
        backward = partials.without(absent)
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
