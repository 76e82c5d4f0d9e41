"""Run eager PyTorch as the reference, and measure how far rounding moves each of its results."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.calls.arguments import ArgumentWatch
from tvmbridge.calls.bases import bases_of
from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.autocast import without_autocast
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import IntermediateBase
from tvmbridge.graph_capture.aliasing import aliases_of
from tvmbridge.inspect.compare.recorder import Recorder, round_again
from tvmbridge.inspect.compare.sample import Sample, state_name
from tvmbridge.inspect.compare.trace import Trace
from tvmbridge.inspect.compare.verdict import Measure

# The number of runs with random rounding; the largest change of a value counts.
_RUNS = 3


@dataclass(frozen=True)
class Reference:
    """The results of eager PyTorch in one precision, and how rounding affects them.

    - ``trace``: all values that the run computed.
    - ``measures``: for each result by name, the scale of its departures and the bound that
      rounding explains.
    - ``unit``: the largest unit of rounding among the dtypes of the computed values.
    - ``unwritten``: names of the results that are buffers or inputs which the call did not change.
    """

    trace: Trace
    measures: Mapping[str, Measure]
    unit: float
    unwritten: frozenset[str]

    def bound(self, name: str) -> float:
        """Return the largest departure of the result ``name`` that rounding explains."""
        return self.measures[name].bound if name in self.measures else 0.0


def run_eager(sample: Sample, *, backward: bool) -> Reference:
    """Run ``sample`` in eager PyTorch, once as it is, and several times with random rounding.

    The first run draws the random numbers and the cotangents, and stores them in the sample.
    """
    trace, unwritten = _run(sample, Recorder(sample.draws), backward)
    generator = torch.Generator().manual_seed(17)
    recorders = [Recorder(sample.draws, generator) for _ in range(_RUNS)]
    moved = [_run(sample, recorder, backward, generator)[0] for recorder in recorders]
    computed = [s.value.dtype for s in trace.steps if s.operator and s.value.is_floating_point()]
    unit = max((torch.finfo(dtype).eps for dtype in computed), default=0.0)
    measures = {}
    for name, number in trace.results.items():
        value = trace.steps[number].value
        noise = max(_largest_change(run.result(name), value) for run in moved)
        measures[name] = Measure.of(value, noise, unit)
    return Reference(trace, measures, unit, unwritten)


def _largest_change(value: torch.Tensor | None, reference: torch.Tensor) -> float:
    if value is None or value.shape != reference.shape or not value.numel():
        return 0.0
    change = (value.double() - reference.double()).abs()
    return float(change.nan_to_num(0.0, 0.0, 0.0).max())


def _run(
    sample: Sample, recorder: Recorder, backward: bool, rounding: torch.Generator | None = None
) -> tuple[Trace, frozenset[str]]:
    """Run one call; return its trace and the names of the state that it did not change.

    With ``rounding``, the values of parameters, buffers and inputs are rounded randomly first.
    """
    module, trace = copy.deepcopy(sample.module), recorder.trace
    args, kwargs, leaves = sample.arguments()
    inputs = {f"input {i}": x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    parameters = dict(module.named_parameters())
    state = {**parameters, **dict(module.named_buffers()), **inputs}
    for tensor in state.values():
        if rounding is not None:
            with torch.no_grad():
                round_again(tensor, rounding)
        trace.add(tensor)
    before = {name: t.detach().clone() for name, t in state.items()}
    with without_autocast():
        with recorder, torch.set_grad_enabled(backward):
            returned = ArgumentWatch(module.forward)(*args, **kwargs)
            results, views = _results(tensors_of(module), returned, leaves)
        if sample.draws is None:
            sample.draws = recorder.draws
        sample.output_names = list(results)
        outputs = {n: r for n, r in results.items() if isinstance(r, torch.Tensor)}
        for name, value in outputs.items():
            trace.note_result(name, value)
        after = inputs | {n: b for n, b in module.named_buffers() if n in before}
        for name, value in after.items():
            trace.note_result(state_name(name), value)
        if backward:
            flowing = {n: o for n, o in outputs.items() if n not in views and o.requires_grad}
            wanted = {n: t for n, t in (inputs | parameters).items() if t.requires_grad}
            if wanted:
                _draw_cotangents(sample, flowing)
            recorder.gradients(flowing, wanted, sample.cotangents)
    same = (state_name(n) for n, value in after.items() if _same(value, before[n]))
    return trace, frozenset(same)


def output_names(value: Any) -> list[str]:
    """Return the names of the leaves of a value that forward returned, tensors or not."""
    paths, _ = pytree.tree_flatten_with_path(value)
    return ["output" + pytree.keystr(path) for path, _ in paths]


def named_bases(
    outputs: Mapping[str, Any], bases: Sequence[IntermediateBase]
) -> dict[str, torch.Tensor]:
    """Return the tensors that are no outputs, but that outputs are views of, by name."""
    names = list(outputs)
    found = bases_of(list(outputs.values()), bases)
    return {f"base of {names[b.output]}": t for b, t in zip(bases, found, strict=True)}


def _results(
    state: dict[str, torch.Tensor], returned: Any, inputs: list[Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return the outputs with their intermediate view bases by name, and the names of the views.

    Compiled code does not compute outputs that are views of other outputs, of inputs or of state.
    Their cotangents arrive at the tensors that they view.
    """
    outputs = dict(zip(output_names(returned), pytree.tree_leaves(returned), strict=True))
    given = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    try:
        sharing = aliases_of(list(outputs.values()), given, state)
    except UnsupportedOperatorError:
        return outputs, set()  # the module is not compiled
    views = {n for n, alias in zip(outputs, sharing.aliases, strict=True) if alias is not None}
    return outputs | named_bases(outputs, sharing.bases), views


def _draw_cotangents(sample: Sample, outputs: Mapping[str, torch.Tensor]) -> None:
    """Draw a cotangent of normal random numbers for each output that has none in the sample yet.

    Constant or smooth cotangents would not do: the gradient of a norm removes them, and little
    more than rounding errors remains.
    """
    for name, output in outputs.items():
        if name not in sample.cotangents:
            generator = torch.Generator().manual_seed(len(sample.cotangents))
            drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            sample.cotangents[name] = drawn.to(output.dtype)
        sample.cotangents[name] = sample.cotangents[name].to(output.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach().nan_to_num(), b.nan_to_num())
