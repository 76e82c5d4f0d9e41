"""Compiled code as CUDA graphs: what of a call is captured, and what autograd gets of a replay."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.executable import Bound
from tvmbridge.compiler.partial_backwards import PartialBackward
from tvmbridge.graph_capture.memory.layouts import Strides
from tvmbridge.runtime.autograd import TrainingCall
from tvmbridge.runtime.cuda_graphs import Lease, Replayed, ReplayedCall, Tensors
from tvmbridge.runtime.step import Held

# Replays a call with some inputs; None: the code has to be called.
Graphs: TypeAlias = Callable[[Tensors], Replayed | None]


@dataclass(frozen=True)
class GraphedCode:
    """Compiled code with the module's tensors where they are now.

    Args:
        compiled: the code.
        tensors: the module's tensors.
        strides: those that outputs get.
        primals_of: from the user's inputs and the module's tensors to the primals but for packed
            weights; draws the noise.
        replays: counts what was replayed: ``forward``, ``backward``.
        skips: counts calls without a graph by the reason.
    """

    compiled: CompiledModule
    tensors: Sequence[torch.Tensor]
    strides: Strides
    primals_of: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    replays: Counter[str]
    skips: Counter[str]

    def inference(self, bound: Bound) -> Graphs:
        """Forward as a graph."""
        return _Inference(self, bound)

    def training(self, call: TrainingCall, held: Held) -> Graphs | None:
        """Forward and backward as a graph each; None where values that backward reads change."""
        return None if call.overwritten.intersection(call.reads) else _Training(self, call, held)

    def run(self, inputs: Tensors, bound: Bound) -> tuple[list[Any], list[Any]]:
        """The results of forward, and the primals."""
        primals = self.primals_of(inputs, self.tensors)
        primals += [None] * len(self.compiled.packs)
        return self.compiled.forward(primals, self.strides, bound), primals

    def call(
        self, name: str, run: Callable[[Tensors], list[Any]], copies: int | None
    ) -> ReplayedCall:
        """``run`` on the code's device, counted under ``name``."""
        device = self.compiled.captured.device
        return ReplayedCall(run, copies, device, self.replays, self.skips, name)


class _Inference:
    def __init__(self, code: GraphedCode, bound: Bound) -> None:
        self._graph = code.call("forward", lambda inputs: code.run(inputs, bound)[0], None)

    def __call__(self, inputs: Tensors) -> Replayed | None:
        outputs = self._graph(inputs)
        return None if outputs is None else Replayed(outputs, ())


class _Training:
    def __init__(self, code: GraphedCode, call: TrainingCall, held: Held) -> None:
        self._skips = code.skips
        self._outputs = call.parts.num_outputs
        self._lease: weakref.ref[Lease] | None = None

        def forward(inputs: Tensors) -> list[Any]:
            (*outputs, residuals), primals = code.run(inputs, held.forward)
            return [*outputs, primals, residuals]

        def read() -> list[Any]:
            *outputs, primals, residuals = self._forward.results
            there = [
                primals[position] if tensor is None else tensor
                for tensor, position in zip(held.there, call.reads, strict=True)
            ]
            kept = [outputs[number] for number, _ in call.parts.kept_outputs]
            return call.as_read([*there, *kept, residuals])

        def backward(cotangents: Tensors) -> list[torch.Tensor]:
            return code.compiled.backward([*read(), *cotangents], held.backward)

        def without_some(partial: PartialBackward, cotangents: Tensors) -> list[torch.Tensor]:
            values = [*read(), *cotangents]
            bound = held.for_partial(partial.loaded, len(values), [call.place_of_residuals])
            return partial.results(values, bound)

        self._forward = code.call("forward", forward, self._outputs)
        self._backward = code.call("backward", backward, None)
        self._partial: dict[PartialBackward, ReplayedCall] = {}
        self._without_some = without_some
        self._code = code

    def __call__(self, inputs: Tensors) -> Replayed | None:
        lease = None if self._lease is None else self._lease()
        if lease is not None and lease.active:
            self._skips["the backward of an earlier call has not run"] += 1
            return None
        results = self._forward(inputs)
        if results is None:
            return None
        *outputs, primals, residuals = results
        lease = Lease(self._graph_of)
        self._lease = weakref.ref(lease)
        return Replayed(outputs, primals, residuals, lease)

    def _graph_of(self, partial: PartialBackward | None) -> ReplayedCall:
        """The graph of backward, of one without some cotangents a graph of its own."""
        if partial is None:
            return self._backward
        found = self._partial.get(partial)
        if found is None:
            run = functools.partial(self._without_some, partial)
            found = self._partial[partial] = self._code.call("backward", run, None)
        return found
