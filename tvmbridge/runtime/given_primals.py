"""Builds the primals (inputs of compiled code) from a call's arguments and the module's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvmbridge.calls.draw_noise import draw_noise
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.types import InputKind
from tvmbridge.kernels.dtypes import as_pairs


class GivenPrimals:
    """Draws the random numbers of a call and returns its primals, except for packed weights.

    - ``inputs``: positions of the user inputs among the leaves of the arguments.
    - ``noise``: indices of the random draws in the order in which compiled code takes the draws:
      masks of dropout come last.
    - ``converts``: whether complex tensors become pairs of real numbers, or a prologue computes
      values that the draws read.
    - ``plain``: whether the primals are just the user inputs and the module's tensors, in order.
    """

    def __init__(self, captured: CapturedGraph) -> None:
        self._captured = captured
        users = [d for d in captured.inputs if d.kind is InputKind.USER]
        self.inputs = [d.position or 0 for d in users]
        noise = captured.noise
        self._has_complex = any(
            spec.dtype.is_complex
            for spec in (*(d.spec for d in captured.inputs), *(n.spec for n in noise))
        )
        self.noise = [i for i, n in enumerate(noise) if n.drop_probability is None]
        self.noise += [i for i, n in enumerate(noise) if n.drop_probability is not None]
        given = {d.name: i for i, d in enumerate(captured.inputs)}
        reads = captured.prologue.reads if captured.prologue is not None else ()
        self._reads = [given[name] for name in reads]
        self.plain = not (noise or self._has_complex or captured.prologue)
        self.converts = self._has_complex or captured.prologue is not None

    def of_call(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Return user inputs, module state and random draws, in the order of the compiled code."""
        return self.of_inputs([leaves[p] for p in self.inputs], tensors)

    def of_inputs(self, inputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Return the same primals, given the user inputs instead of all leaves."""
        captured = self._captured
        primals = [*inputs, *tensors]
        if self.plain:
            return primals
        noise = draw_noise(captured.noise, captured.prologue, [primals[i] for i in self._reads])
        primals += [noise[i] for i in self.noise]
        return list(map(as_pairs, primals)) if self._has_complex else primals
