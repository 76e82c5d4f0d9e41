"""Compiled code as CUDA graphs: one graph for forward, and one for each kind of backward."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.compiler.backward_code import PartialBackward
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.executable import Bound, Residuals, lent_tensors
from tvmbridge.core.locks import Lock
from tvmbridge.core.torch_private import backward_keeps_graph
from tvmbridge.kernels.allocation import residuals_emptied
from tvmbridge.runtime.autograd import TrainingCall
from tvmbridge.runtime.cuda_graphs import GraphMemory, Lease, Replayed, ReplayedCall, Tensors
from tvmbridge.runtime.step import ConvertedTensors

# Replays a call with these user inputs; returns None if the code has to be called instead.
Graphs: TypeAlias = Callable[[Tensors], Replayed | None]


@dataclass(frozen=True)
class GraphedCode:
    """Compiled code with the module's tensors at their present addresses.

    Args:
        strides: the strides of the outputs; None: the strides of the sample.
        primals_of: computes the primals, except for packed weights, from the user inputs and the
            module's tensors; it draws the random numbers.
    """

    compiled: CompiledModule
    tensors: Sequence[torch.Tensor]
    strides: Strides
    primals_of: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    replays: Counter[str]
    skips: Counter[str]

    def inference(self, bound: Bound) -> Graphs:
        """Return a function that runs forward by a graph, for inference."""
        return _Inference(self, bound)

    def training(self, call: TrainingCall, held: ConvertedTensors) -> Graphs | None:
        """Return a function that runs forward by a graph and leases residuals to backward's graph.

        None: a call overwrites primals that backward reads.
        """
        return None if call.overwritten.intersection(call.reads) else _Training(self, call, held)

    def memory(self) -> GraphMemory:
        """Return memory for graphs of this code."""
        return GraphMemory(self.compiled.captured.device)

    def run(self, inputs: Tensors, bound: Bound) -> tuple[list[Any], list[Any]]:
        """Run forward; return its results, and the primals that it has read."""
        primals = self.primals_of(inputs, self.tensors)
        primals += [None] * len(self.compiled.packs)
        # Outputs are copied out of the graph's memory.
        return self.compiled.forward(primals, self.strides, bound, copied=True), primals

    def call(
        self,
        name: str,
        run: Callable[[Tensors], list[Any]],
        memory: GraphMemory,
        copies: int | None = None,
        read: Collection[int] = (),
    ) -> ReplayedCall:
        """Wrap ``run`` in a :class:`ReplayedCall`.

        Args:
            copies: how many of the first results are returned as copies; None: all of them.
            read: the numbers of the copied results that other graphs read.
        """
        return ReplayedCall(run, copies, memory, self.replays, self.skips, name, read)


class _Inference:
    """Runs calls in inference by one graph of forward."""

    def __init__(self, code: GraphedCode, bound: Bound) -> None:
        self._graph = code.call("forward", lambda inputs: code.run(inputs, bound)[0], code.memory())

    def __call__(self, inputs: Tensors) -> Replayed | None:
        outputs = self._graph(inputs)
        return None if outputs is None else Replayed(outputs, ())


class _Training:
    """Runs training calls by a graph of forward, and leases its residuals to graphs of backward.

    While the backward of an earlier call has not run, calls are made without a graph. The graph of
    the whole backward uses the memory of residuals again that it has read for the last time. So it
    runs once for each forward: a backward that keeps its graph runs without a CUDA graph.
    """

    def __init__(self, code: GraphedCode, call: TrainingCall, held: ConvertedTensors) -> None:
        self._skips = code.skips
        self._outputs = call.parts.num_outputs
        self._lease: weakref.ref[Lease] | None = None
        # Another thread's forward would overwrite the residuals before they are leased.
        self._starting = Lock()
        # The residuals in the forward graph's memory, and tensors there that do not keep it.
        self._residuals: Residuals = ()
        self._lent: tuple[torch.Tensor, ...] | None = None
        memory = self._partials_memory = code.memory()

        def forward(inputs: Tensors) -> list[Any]:
            (*outputs, residuals), primals = code.run(inputs, held.forward)
            return [*outputs, primals, residuals]

        def read() -> list[Any]:
            *outputs, primals, _ = self._forward.results
            held_primals = [
                primals[position] if tensor is None else tensor
                for tensor, position in zip(held.read, call.reads, strict=True)
            ]
            kept = [outputs[number] for number, _ in call.parts.kept_outputs]
            return call.as_read([*held_primals, *kept, self._residuals])

        def backward(cotangents: Tensors) -> list[torch.Tensor]:
            values = [*read(), *cotangents]
            self._residuals, self._partials_memory = self._lent or (), code.memory()
            for graph in self._partial.values():
                graph.use(self._partials_memory)
            with residuals_emptied():
                return code.compiled.backward(values, held.backward)

        def without_some(partial: PartialBackward, cotangents: Tensors) -> list[torch.Tensor]:
            values = [*read(), *cotangents]
            bound = held.for_partial(partial.loaded, len(values), [call.place_of_residuals])
            return partial.results(values, bound)

        kept = [number for number, _ in call.parts.kept_outputs]
        self._forward = code.call("forward", forward, memory, self._outputs, kept)
        self._backward = code.call("backward", backward, memory)
        # Once the whole backward is captured, the residuals' memory is free for later captures in
        # the same memory: they would write there before they read, so that they get their own.
        self._partial: dict[PartialBackward, ReplayedCall] = {}
        self._without_some = without_some
        self._code = code
        self._call = call

    def __call__(self, inputs: Tensors) -> Replayed | None:
        with self._starting:
            return self._started(inputs)

    def _started(self, inputs: Tensors) -> Replayed | None:
        lease = None if self._lease is None else self._lease()
        if lease is not None and lease.active:
            self._skips["the backward of an earlier call has not run"] += 1
            return None
        results = self._forward(inputs)
        if results is None:
            return None
        *outputs, primals, residuals = results
        if self._lent is None:
            self._residuals, self._lent = residuals, lent_tensors(residuals)
        lease = Lease(self._graph_of)
        self._lease = weakref.ref(lease)
        return Replayed(outputs, primals, self._lent, lease)

    def _graph_of(self, partial: PartialBackward | None) -> ReplayedCall | None:
        """Return the graph of a partial backward, created at its first use; None: the whole.

        The result is None if backward must run without a graph.
        """
        if partial is None:
            if backward_keeps_graph():
                self._skips["backward keeps its graph"] += 1
                return None
            self._backward.count(self._call.backwards)
            return self._backward
        found = self._partial.get(partial)
        if found is None:
            run = functools.partial(self._without_some, partial)
            found = self._partial[partial] = self._code.call("backward", run, self._partials_memory)
        return found
