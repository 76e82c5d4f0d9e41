"""The autograd node of a call of compiled code, and the ways that its backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.compiler.partial_backwards import all_finite, refuse_unusual
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.called_in_mode import with_autocast_off, without_gradients
from tvmbridge.core.profiling import region
from tvmbridge.core.reasons import Reason
from tvmbridge.core.torch_private import backward_keeps_graph, left_to_python
from tvmbridge.runtime.gradient_parts import Handed, link_of
from tvmbridge.runtime.primals import refuse_hooks
from tvmbridge.runtime.second_order import refuse
from tvmbridge.runtime.step import ConvertedTensors, TrainingStep

# The number of arguments of the autograd function before its tensors.
_BEFORE_SOURCES = 2


class CompiledFunction(torch.autograd.Function):
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
    @left_to_python
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if autocast_now():  # backward runs in the dtypes of forward, as in eager PyTorch
            return with_autocast_off(CompiledFunction.backward, ctx, *cotangents)
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
    call = ctx.step.call
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
        with step.packing(held):
            return handed.first(filled, held), handed


def _all_gradients(
    ctx: Any, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Run the whole compiled backward; return all gradients."""
    step: TrainingStep = ctx.step
    step.refuse_freed()
    step.refuse_written(cotangents)
    with region(f"{step.call.compiled.origin} backward"):
        held = step.unchanged()
        with step.packing(held):
            return _run_backward(step, step.restored(saved), cotangents, held)


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
            with step.residuals_end():
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
