"""CUDA graphs: the kernel launches of a call are recorded once and replayed.

A graph reads its inputs at the addresses of its capture and writes its results to its own memory.
Inputs that change are therefore copied in before a replay, and results are copied out after it. If
a replay would not be safe, the call runs without a graph and the reason is counted.

The graphs of forward and backward share memory. What a graph uses during its replay alone, such as
workspaces and results that are copied out, is free for the other graphs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.calls.layouts import dense_strides
from tvmbridge.core.borrowed import borrowed
from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.devices import gpu_index
from tvmbridge.core.kernel_settings import gpu_settings
from tvmbridge.core.locks import Lock
from tvmbridge.core.torch_private import current_raw_stream, foreach_mul, free_cublas_workspaces

# Calls without a graph before the capture, in which libraries choose kernels and allocate memory.
_WARM_UP = 2
# The dtypes of which PyTorch multiplies several tensors by one in one launch, without a change of
# any bit. It multiplies no tensors of other dtypes, such as float8, and changes complex infinities.
_MULTIPLIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_MULTIPLIED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}

Tensors = Sequence[torch.Tensor]


class GraphMemory:
    """The memory that several graphs share: a memory pool of PyTorch for each stream.

    A graph may overwrite whatever another one has freed during its capture. So graphs that share
    memory are replayed on one stream, one at a time: :class:`ReplayedCall` holds ``lock`` until the
    results are copied out. On another stream they would overwrite each other, so that each stream
    has a pool of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = Lock()
        self._pools: dict[int, Any] = {}

    def pool(self, stream: int) -> Any:
        """Return the handle of the pool for graphs that are replayed on ``stream``."""
        if stream not in self._pools:
            self._pools[stream] = torch.cuda.graph_pool_handle()
        return self._pools[stream]

    def abandon(self, stream: int) -> None:
        """Let later captures use a new pool, because PyTorch captures nothing after a failure."""
        self._pools.pop(stream, None)


class ReplayedCall:
    """A GPU function that is captured as a CUDA graph at its third call and replayed afterwards.

    Args:
        run: the function. It must launch the same kernels at each call, on the current stream.
        copies: how many of the first results are returned as copies; None: all of them.
        replayed: a counter of replays, incremented under ``name``.
        skipped: a counter of calls without a graph, incremented under the reason.
        read: the numbers of the copied results that other graphs read in this graph's memory.
    """

    def __init__(
        self,
        run: Callable[[Tensors], list[Any]],
        copies: int | None,
        memory: GraphMemory,
        replayed: Counter[str],
        skipped: Counter[str],
        name: str,
        read: Collection[int] = (),
    ) -> None:
        self.run = run
        self.copies = copies
        self.memory = memory
        self.read = frozenset(read)
        self.replayed = replayed
        self.skipped = skipped
        self.name = name
        self.inputs: list[torch.Tensor] = []
        self.results: list[Any] = []
        self._index = gpu_index(memory.device)
        self._calls = 0
        self._stream = 0
        self._settings: tuple[Any, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed = ""
        # The numbers of results with padded rows.
        self._padded: frozenset[int] = frozenset()

    def __call__(self, inputs: Tensors) -> list[Any] | None:
        """Replay the graph; return its results, or None if the caller has to call ``run``.

        The first ``copies`` results are copies. The others stay in the graph's own memory and are
        valid until the next replay.
        """
        with self.memory.lock:
            reason = self._refused()
            if reason:
                self.skipped[reason] += 1
                return None
            if self._graph is None:
                self._calls += 1
                if self._calls <= _WARM_UP or not self._captured(inputs):
                    return None
            assert self._graph is not None
            return without_gradients(self._replay, self._graph, inputs)

    def use(self, memory: GraphMemory) -> None:
        """Capture in ``memory``, unless the function is captured already."""
        if self._graph is None:
            self.memory = memory

    def count(self, calls: int) -> None:
        """Count ``calls`` of the function, all without a graph, as calls before the capture."""
        self._calls = max(self._calls, calls)

    def _replay(self, graph: torch.cuda.CUDAGraph, inputs: Tensors) -> list[Any]:
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        graph.replay()
        self.replayed[self.name] += 1
        return [*_copied(self.results[: self.copies], self._padded), *self._kept()]

    def _kept(self) -> list[Any]:
        return [] if self.copies is None else self.results[self.copies :]

    def _refused(self) -> str:
        if self._failed:
            return self._failed
        if torch.cuda.is_current_stream_capturing():
            return "the call itself is being captured"
        if self._graph is not None and self._stream != current_raw_stream(self._index):
            return "it is on another stream than the calls before"
        if self._graph is not None and self._settings != gpu_settings():
            return "a setting of cuBLAS or cuDNN, such as fp32_precision, is another than it was"
        return ""

    def _captured(self, inputs: Tensors) -> bool:
        self._stream = current_raw_stream(self._index)
        self._settings = gpu_settings()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._index)
        try:
            with torch.no_grad(), torch.cuda.device(self._index):
                self.inputs = [t.detach().clone() for t in inputs]
                # Without cuBLAS workspaces in the cache the graph allocates one in its own memory.
                # Replays would otherwise write into a workspace after PyTorch has freed it.
                free_cublas_workspaces()
                pool = self.memory.pool(self._stream)
                with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                    results = self.run(self.inputs)
                free_cublas_workspaces()
                self._padded = frozenset(
                    number
                    for number, result in enumerate(results[: self.copies])
                    if dense_strides(result) not in (None, result.stride())
                )
                self.results = self._without_copied(results)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self._failed = f"it cannot be captured: {first_line}"
            self.inputs, self.results = [], []
            self.memory.abandon(self._stream)
            _end_failed_capture(current)
            return False
        self._graph = graph
        return True

    def _without_copied(self, results: list[Any]) -> list[Any]:
        """Release the memory of results that are copied out, and of no use after that.

        The graph still writes them at their addresses. Another graph of the shared memory may write
        there too, but only after they are copied.
        """
        last = len(results) if self.copies is None else self.copies
        return [
            borrowed(result) if i < last and i not in self.read and result.numel() else result
            for i, result in enumerate(results)
        ]


def _end_failed_capture(current: torch.cuda.Stream) -> None:
    """Restore the stream and the random generator after a capture has failed.

    ``torch.cuda.graph`` stays on its own stream if the capture cannot end. PyTorch's generator then
    refuses to draw ("Offset increment outside graph capture") until another capture has ended.
    """
    torch.cuda.set_stream(current)
    with contextlib.suppress(RuntimeError), torch.no_grad(), torch.cuda.device(current.device):
        tensor = torch.zeros(1, device=current.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            tensor.zero_()
    torch.cuda.set_stream(current)


def _copied(tensors: list[torch.Tensor], padded: frozenset[int]) -> list[torch.Tensor]:
    """Copy tensors with their strides; one kernel launch copies all tensors of a dtype.

    The copies of tensors with ``padded`` numbers are contiguous. Each of them is a launch of its
    own: PyTorch would otherwise copy all tensors one by one.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.dtype in _MULTIPLIED and tensor.numel() and number not in padded:
            groups.setdefault(tensor.dtype, []).append(number)
    copies: list[Any] = [None] * len(tensors)
    for dtype, numbers in groups.items():
        if len(numbers) > 1:
            one = 1.0 if dtype.is_floating_point else 1
            made = foreach_mul([tensors[n] for n in numbers], one)
            for number, copy in zip(numbers, made, strict=True):
                copies[number] = copy
    for number in padded:
        copies[number] = tensors[number].clone(memory_format=torch.contiguous_format)
    return [t.clone() if c is None else c for t, c in zip(tensors, copies, strict=True)]


class Lease:
    """The right to use a graph's residuals, from a forward call until its backward has run."""

    def __init__(self, graphs: Callable[[Any], ReplayedCall | None]) -> None:
        """Create a lease.

        ``graphs`` maps a partial backward, or None for all, to its graph; None: without a graph.
        """
        self._graphs = graphs
        self.active = True

    def backward(self, cotangents: Tensors, partial: Any = None) -> list[torch.Tensor] | None:
        """Return the gradients; None if backward has to be called without a graph.

        Args:
            partial: the :class:`PartialBackward` for exactly these cotangents; None: all arrived.
        """
        graph = self._graphs(partial) if self.active else None
        return None if graph is None else graph(cotangents)

    def end(self) -> None:
        """Release the residuals for the next call."""
        self.active = False


@dataclass(frozen=True)
class Replayed:
    """The results of a replay of forward.

    - ``outputs``: copies of the outputs.
    - ``primals``: the inputs of compiled code, in the graph's own memory.
    - ``residuals``: the values that backward reads, in the graph's memory; None in inference.
    - ``lease``: the right to use the residuals; None in inference.
    """

    outputs: list[torch.Tensor]
    primals: Sequence[Any]
    residuals: Any = None
    lease: Lease | None = None
