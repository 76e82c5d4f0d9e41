"""Eager PyTorch as the reference, and the amount by which rounding moves each of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.types import IntermediateBase
from tvmbridge.graph_capture.memory.aliasing import aliases_of
from tvmbridge.graph_capture.memory.bases import bases_of
from tvmbridge.graph_capture.trace.arguments import ArgumentWatch
from tvmbridge.graph_capture.trace.standins import tensors_of, without_autocast
from tvmbridge.inspect.compare.recorder import Recorder, round_again
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.trace import Trace

# Runs with moved roundings; the largest of the departures is the scale of rounding.
_RUNS = 3


@dataclass(frozen=True)
class Reference:
    """What eager PyTorch computes in one precision.

    ``noise`` gives for each result by how much rounding moves it: the largest absolute change of
    an element when every operation is rounded again. ``unwritten`` are the buffers and inputs,
    results too, that the call left as they were.
    """

    trace: Trace
    noise: Mapping[str, float]
    unwritten: frozenset[str]


def output_names(value: Any) -> list[str]:
    """The names of the leaves of what forward returns, tensors or not."""
    paths, _ = pytree.tree_flatten_with_path(value)
    return ["output" + pytree.keystr(path) for path, _ in paths]


def run_eager(sample: Sample, *, backward: bool) -> Reference:
    """Run ``sample``; the first run draws the random numbers and the cotangents, and keeps them.

    Args:
        backward: also the gradients of parameters and inputs that require one.
    """
    unwritten: set[str] = set()
    trace = _run(sample, Recorder(sample.draws), backward, unwritten=unwritten)
    noise = dict.fromkeys(trace.results, 0.0)
    generator = torch.Generator().manual_seed(17)
    for _ in range(_RUNS):
        moved = _run(sample, Recorder(sample.draws, generator), backward, generator)
        for name in noise:
            value = moved.result(name)
            if value is not None:
                noise[name] = max(noise[name], _largest_change(value, trace.result(name)))
    return Reference(trace, noise, frozenset(unwritten))


def _largest_change(value: torch.Tensor, reference: torch.Tensor | None) -> float:
    if reference is None or value.shape != reference.shape or not value.numel():
        return 0.0
    change = (value.double() - reference.double()).abs()
    return float(change.nan_to_num(0.0, 0.0, 0.0).max())


def _run(
    sample: Sample,
    recorder: Recorder,
    backward: bool,
    rounding: torch.Generator | None = None,
    unwritten: set[str] | None = None,
) -> Trace:
    with sample.unchanged_state(), ExitStack() as stack:
        if rounding is not None:
            stack.enter_context(_moved_parameters(sample, rounding))
        stack.enter_context(without_autocast())
        args, kwargs, leaves = sample.arguments()
        tensors = {f"input {i}": x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        state = dict([*sample.module.named_parameters(), *sample.module.named_buffers()])
        if rounding is not None:
            with torch.no_grad():
                for tensor in tensors.values():
                    round_again(tensor, rounding)
        for name, tensor in (tensors | state).items():
            recorder.given(name, tensor)
        before = {name: t.detach().clone() for name, t in (tensors | state).items()}
        with recorder, torch.set_grad_enabled(backward):
            returned = run_forward(sample, args, kwargs)
            results, views = _results(sample, returned, leaves)
        if sample.draws is None:
            sample.draws = recorder.draws
        sample.output_names = list(results)
        outputs = {n: r for n, r in results.items() if isinstance(r, torch.Tensor)}
        for name, value in outputs.items():
            recorder.result(name, value)
        after = dict(sample.module.named_buffers())
        for name, tensor in (tensors | {n: b for n, b in after.items() if n in before}).items():
            title = state_name(name)
            recorder.result(title, tensor)
            if unwritten is not None and _same(tensor, before[name]):
                unwritten.add(title)
        if backward:
            wanted = tensors | dict(sample.module.named_parameters())
            computed = {name: o for name, o in outputs.items() if name not in views}
            _gradients(sample, recorder, computed, wanted, rounding)
        return recorder.trace.build()


def run_forward(sample: Sample, args: Any, kwargs: Any) -> Any:
    """The module's own forward, with the arguments that it changes among the results.

    The recorder looks for this frame to find the user's line.
    """
    return ArgumentWatch(sample.module.forward)(*args, **kwargs)


def state_name(name: str) -> str:
    """The name of an input or a buffer as a result of the call."""
    return f"{name} after the call"


def named_bases(
    outputs: Mapping[str, Any], bases: Sequence[IntermediateBase]
) -> dict[str, torch.Tensor]:
    """The intermediate view bases of ``outputs``, by name."""
    names = list(outputs)
    found = bases_of(list(outputs.values()), bases)
    return {f"base of {names[b.output]}": t for b, t in zip(bases, found, strict=True)}


def _results(sample: Sample, returned: Any, inputs: list[Any]) -> tuple[dict[str, Any], set[str]]:
    """The outputs and their intermediate view bases, by name, and which of them are views.

    Compiled code does not compute views of others, of inputs or of state, so that their cotangents
    arrive elsewhere.
    """
    outputs = dict(zip(output_names(returned), pytree.tree_leaves(returned), strict=True))
    given = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    try:
        sharing = aliases_of(list(outputs.values()), given, tensors_of(sample.module))
    except UnsupportedOperatorError:
        return outputs, set()  # it will not be compiled
    views = {n for n, alias in zip(outputs, sharing.aliases, strict=True) if alias is not None}
    return outputs | named_bases(outputs, sharing.bases), views


def _gradients(
    sample: Sample,
    recorder: Recorder,
    outputs: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    rounding: torch.Generator | None,
) -> None:
    flowing = {name: o for name, o in outputs.items() if o.requires_grad}
    leaves = {name: t for name, t in wanted.items() if t.requires_grad}
    if not flowing or not leaves:
        return
    cotangents = [cotangent_of(sample, name, o) for name, o in flowing.items()]
    if rounding is not None:
        # Sums of cotangents may cancel, of which nothing that is computed here would tell.
        cotangents = [c.clone() for c in cotangents]
        for cotangent in cotangents:
            round_again(cotangent, rounding)
    for name, cotangent in zip(flowing, cotangents, strict=True):
        recorder.given(f"cotangent of {name}", cotangent)
    with recorder:
        gradients = torch.autograd.grad(
            list(flowing.values()), list(leaves.values()), cotangents, allow_unused=True
        )
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            recorder.result(f"gradient of {name}", gradient)


def cotangent_of(sample: Sample, name: str, output: torch.Tensor) -> torch.Tensor:
    """The gradient that arrives for an output: normal numbers, drawn once and kept.

    Smooth numbers would not do: a norm takes them away, and little but rounding remains.
    """
    if name not in sample.cotangents:
        generator = torch.Generator().manual_seed(len(sample.cotangents))
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        sample.cotangents[name] = drawn.to(output.dtype)
    return sample.cotangents[name].to(output.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach().nan_to_num(), b.nan_to_num())


@contextmanager
def _moved_parameters(sample: Sample, rounding: torch.Generator) -> Iterator[None]:
    held = [*sample.module.parameters(), *sample.module.buffers()]
    before = [p.detach().clone() for p in held]
    try:
        with torch.no_grad():
            for parameter in held:
                round_again(parameter, rounding)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(held, before, strict=True):
                parameter.copy_(value)
