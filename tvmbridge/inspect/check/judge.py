"""Judge the values of a checked call: rounding or mistake, and which operator is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture.observe.refusal import first_paragraph
from tvmbridge.inspect.check.twin import GeneratorStates, restarted
from tvmbridge.inspect.compare.comparison import STAGES, Comparison
from tvmbridge.inspect.compare.reference import run_eager
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.verdict import FLOOR, Measure

_NOT_AN_OPERATOR = (
    "compiled anew from the module as it is now, every stage agrees with PyTorch: the departure is "
    "in no operator, but in what the code had frozen, or in how it is called (draws, memory, "
    "write-back)"
)


class Judge:
    """Judges the values of one call, or the gradients of its backward.

    - A value within the smallest bound of :mod:`tvmbridge.inspect.compare.verdict` agrees.
    - For any other value the judge measures how far rounding moves it in eager PyTorch. A value
      beyond the bound of this measurement is a mistake.
    - A value within that bound is ``doubtful``, since a small mistake may hide there.
      :meth:`settle` decides by a comparison in float64.

    Args:
        sample: the module and its arguments before the call, with the cotangents for backward.
    """

    def __init__(
        self, sample: Sample, states: GeneratorStates, backward: bool, options: CompileOptions
    ) -> None:
        self._sample = sample
        self._states = states
        self._backward = backward
        self._options = options
        self.doubtful: dict[str, str] = {}

    @cached_property
    def _measures(self) -> Mapping[str, Measure]:
        with restarted(self._states):
            return run_eager(self._sample, backward=self._backward).measures

    def fault(self, name: str, actual: Any, expected: Any) -> str | None:
        """Return what is wrong with ``actual``, in words with figures; None if nothing is."""
        if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
            same = actual is expected or (type(actual) is type(expected) and actual == expected)
            return None if same else f"is {_kind(actual)} where PyTorch has {_kind(expected)}"
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return f"is {_kind(actual)} where PyTorch has {_kind(expected)}"
        if actual.requires_grad is not expected.requires_grad:
            return f"has requires_grad={actual.requires_grad}, in PyTorch {expected.requires_grad}"
        actual, expected = _real(actual.detach()), _real(expected.detach())
        unit = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        rough = Measure.of(expected, 0.0, unit)
        error = rough.departure(actual)
        if error <= rough.bound:
            return None
        bound = rough.bound
        measure = self._measures.get(name)
        if measure is not None:
            error, bound = measure.departure(actual, expected), measure.bound
        figures = f"departs from PyTorch by {error:.1e}, where rounding explains {bound:.1e}"
        if error > bound or math.isnan(error):
            return figures
        if error > FLOOR * unit:
            self.doubtful[name] = figures
        return None

    def settle(self) -> tuple[str, str] | None:
        """Compare doubtful values in float64; return the name and figures of a mistake, or None."""
        found = self._compared({"compiled"}, lambda c: c.run().mistakes)
        for departure in () if isinstance(found, str) else found:
            if departure.value in self.doubtful:
                text = self.doubtful[departure.value]
                return departure.value, f"{text}, and by {departure.error_float64:.1e} in float64"
        return None

    def operator(self, name: str) -> str:
        """Return a sentence that names the first operator that departs for the value ``name``."""
        found = self._compared(STAGES, lambda c: c.run())
        if isinstance(found, str):
            return found
        if found.reason:
            return f"its operator was not found: {found.reason}"
        mistakes = [d for d in found.mistakes if d.value == name] or found.mistakes
        return f"first departing operator: {mistakes[0]}" if mistakes else _NOT_AN_OPERATOR

    def _compared(self, stages: Any, look: Callable[[Comparison], Any]) -> Any:
        """Call ``look`` on a new comparison; return its result, or a sentence if it fails."""
        with restarted(self._states), torch.enable_grad():
            try:
                return look(Comparison(self._sample, self._backward, stages, self._options))
            except Exception as error:
                return f"its operator was not found: {first_paragraph(error)}"


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return repr(value)
