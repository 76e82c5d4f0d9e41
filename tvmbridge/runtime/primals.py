"""The primals (inputs of compiled code) of a call: their values, positions by role, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from tvmbridge.calls.draw_noise import draw_noise
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import LEAVE_TO_EAGER, BridgeError
from tvmbridge.core.types import InputKind, OutputKind
from tvmbridge.kernels.dtypes import as_pairs

_NO_GRADIENT_FOR_HOOK = (
    "a hook on {name} would be called without a gradient, where eager PyTorch does not call it: no "
    "output that this backward starts from depends on {name}. Remove the hook, use the output that "
    f"does, or {LEAVE_TO_EAGER}"
)


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that selects the elements of a sequence at ``positions``."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple(values[p] for p in positions)


def packed_into(compiled: CompiledModule, reads: set[int]) -> list[int]:
    """Return positions of the parameters whose packed values are among the primals ``reads``."""
    assert compiled.split is not None
    position = {
        d.target: i
        for i, d in enumerate(compiled.captured.primals)
        if d.kind is InputKind.PARAMETER
    }
    first = len(compiled.split.primals) - len(compiled.packs)
    packs = (names for i, names in enumerate(compiled.packs, start=first) if i in reads)
    return [position[name] for names in packs for name in names]


def overwritten_by(compiled: CompiledModule) -> frozenset[int]:
    """Return positions of the primals that a call writes into: buffers and arguments."""
    captured = compiled.captured
    written = {(o.kind, o.target) for o in captured.outputs if o.kind is not OutputKind.USER}
    return frozenset(
        i
        for i, d in enumerate(compiled.captured.primals)
        if (OutputKind.INPUT_MUTATION, d.name) in written
        or (d.kind is InputKind.BUFFER and (OutputKind.BUFFER_MUTATION, d.target) in written)
    )


def refuse_hooks(
    compiled: CompiledModule,
    positions: Sequence[int],
    sources: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
) -> None:
    """Raise if autograd would call a hook on a primal that no gradient reaches.

    Args:
        positions: the positions of the primals that the code computes gradients of.
        gradients: the gradients of this backward; None if none reaches the primal.
    """
    for position, source, gradient, asked in zip(
        positions, sources, gradients, wanted, strict=False
    ):
        if gradient is not None or not asked:
            continue
        if source._backward_hooks or getattr(source, "_post_accumulate_grad_hooks", None):
            descriptor = compiled.captured.primals[position]
            name = descriptor.target or descriptor.name
            raise BridgeError(_NO_GRADIENT_FOR_HOOK.format(name=name))


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
