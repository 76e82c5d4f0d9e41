"""From a call's arguments and the module's tensors to the primals of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.types import InputKind
from tvmbridge.graph_capture.draw_noise import draw_noise
from tvmbridge.kernels.dtypes import as_pairs


class GivenPrimals:
    """Draws the noise of a call, and puts its primals in order: all but the packed weights.

    ``inputs`` are the positions of the user inputs among the arguments, ``noise`` are the draws in
    the order of the code: masks of dropout come last. ``converts`` where a call is more than
    draws: complex numbers become pairs, and what draws read is computed before them. ``plain``
    where it is none of that: user inputs and the module's tensors, in order.
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
        """User inputs, state, draws and masks, in the order of the compiled code."""
        return self.of_inputs([leaves[p] for p in self.inputs], tensors)

    def of_inputs(self, inputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The same, of the user inputs alone."""
        captured = self._captured
        primals = [*inputs, *tensors]
        if self.plain:
            return primals
        noise = draw_noise(captured.noise, captured.prologue, [primals[i] for i in self._reads])
        primals += [noise[i] for i in self.noise]
        return list(map(as_pairs, primals)) if self._has_complex else primals
