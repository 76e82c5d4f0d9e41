"""One stage as PyTorch's pipelining engine calls it for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from tvmbridge.core.devices import gpus_of
from tvmbridge.core.errors import PipelineError, first_line
from tvmbridge.distributed.splitting import OutputSource, StageModule
from tvmbridge.runtime.halves import weights_follow_inputs

# Multiplying by odd numbers mixes the seeds; 63 bits keep them valid for PyTorch.
_MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_SEED_BITS = (1 << 63) - 1


def seed_of(seed: int, step: int, microbatch: int, stage: int) -> int:
    """Return the seed of the random draws of one stage for one micro-batch of one step."""
    mixed = seed
    for number, mixer in zip((step, microbatch, stage), _MIXERS, strict=True):
        mixed = ((mixed ^ (number + 1)) * mixer) & _SEED_BITS
        mixed ^= mixed >> 29
    return mixed


class MicrobatchInputs:
    """The flattened inputs of the step's micro-batches, shared by the stages of a rank."""

    def __init__(self) -> None:
        self.leaves: Sequence[Sequence[Any]] = ()
        self.step = 0
        self.seed = 0


class StageForward(nn.Module):
    """Runs a stage's module on the received values and on the inputs that the stage needs.

    ``module`` may be dispatched. Random draws use a seed for each micro-batch; the state of the
    process's generator is restored afterwards.
    """

    def __init__(self, stage: StageModule, device: torch.device, inputs: MicrobatchInputs) -> None:
        super().__init__()
        self.module = stage.module
        self.stage = stage
        self.device = device
        self.inputs = inputs
        self.microbatch = 0

    def forward(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the values that the stage sends, or the outputs if it is the last."""
        leaves = self.inputs.leaves[self.microbatch]
        given = [leaves[i] for i in self.stage.used_inputs]
        with self._draws():
            made = self.module(*received, *given)
        return tuple(
            made[source.value] if source.kind == "made" else received[source.value]
            for source in self.stage.outputs
            if source.kind != "constant"
        )

    @contextmanager
    def _draws(self) -> Iterator[None]:
        if not self.stage.random:
            yield
            return
        with torch.random.fork_rng(devices=gpus_of(self.device)):
            at = self.inputs
            torch.manual_seed(seed_of(at.seed, at.step, self.microbatch, self.stage.index))
            yield


def with_constants(outputs: Sequence[OutputSource], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the leaves of the module's outputs: the last stage's tensors, and constants."""
    rest = iter(tensors)
    return [s.value if s.kind == "constant" else next(rest) for s in outputs]


class ZeroBubbleStage(PipelineStage):
    """A stage of PyTorch's engine whose compiled code frees residuals between halves of backward.

    Schedules without bubbles ask for the gradients of a stage's inputs first and for those of its
    weights later. Residuals that only the first need are freed after them. PyTorch's own class
    works with dispatched modules as well, and keeps these residuals until the gradients of weights.
    Arguments are those of ``torch.distributed.pipelining.PipelineStage``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By micro-batch: what keeps the graph of its forward alive between the halves of backward.
        # The engine detaches the outputs, and a node that Python defines does not keep itself.
        self._graphs: dict[int, list[GradientEdge]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run forward of one micro-batch."""
        with weights_follow_inputs():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the inputs of one micro-batch, or all gradients."""
        if not kwargs.get("full_backward", True):
            outputs = self.fwd_cache[bwd_chunk_id][0]
            self._graphs[bwd_chunk_id] = [get_gradient_edge(t) for t in outputs if t.requires_grad]
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the weights of one micro-batch."""
        try:
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            self._graphs.pop(bwd_chunk_id, None)


class EngineStage(ZeroBubbleStage):
    """A stage of PyTorch's engine that records its micro-batch and what it waits for.

    - ``waits_for``: the value that it asked for last, for error messages.
    - ``marks``: whether each piece of work is a range of torch.profiler, such as ``F0.3`` for the
      forward of micro-batch 3 in stage 0.
    - ``events``: on a GPU, each piece of work with an event before and one after it.
    - ``begins``: called before each piece of work.
    """

    def __init__(
        self,
        forward: StageForward,
        stages: int,
        group: dist.ProcessGroup | None = None,
        *,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        stage = forward.stage
        super().__init__(
            forward,
            stage.index,
            stages,
            forward.device,
            input_args=_samples(stage.received, forward.device),
            output_args=_samples(outputs_of(stage), forward.device),
            group=group,
        )
        self.runs = forward
        self._begins = begins
        self.marks = False
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.waits_for = ""

    @contextmanager
    def _mark(self, kind: str, microbatch: int) -> Iterator[None]:
        if not self.marks:
            yield
            return
        name = f"{kind}{self.stage_index}.{microbatch}"
        with record_function(name):
            if self.device.type != "cuda":
                yield
                return
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self.device)
            start.record(stream)
            yield
            end.record(stream)
            self.events.append((name, start, end))

    @contextmanager
    def _named(self, what: str, microbatch: int) -> Iterator[None]:
        """Report the start of work, and add the stage and micro-batch to an error."""
        self._begins()
        try:
            yield
        except Exception as error:
            cause = error.__cause__ or error
            told = f"{type(cause).__name__}: {first_line(cause)}"
            raise PipelineError(
                f"stage {self.stage_index} on rank {self.group_rank} failed in {what} of "
                f"micro-batch {microbatch}: {told}"
            ) from error

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run forward of one micro-batch."""
        self.runs.microbatch = fwd_chunk_id
        with self._mark("F", fwd_chunk_id), self._named("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run backward of one micro-batch; send zeros where a gradient is None."""
        kind = "B" if kwargs.get("full_backward", True) else "I"
        with self._mark(kind, bwd_chunk_id), self._named("backward", bwd_chunk_id):
            received = self.args_recv_info[bwd_chunk_id]
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache.get(bwd_chunk_id)
        if gradients is not None and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(info.buffer) if g is None and info.buffer is not None else g
                for g, info in zip(gradients, received, strict=False)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the parameters, if the schedule separates them."""
        with self._mark("W", bwd_chunk_id), self._named("backward", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the inputs of a micro-batch."""
        self._note(f"micro-batch {fwd_chunk_id} from stage {self.stage_index - 1}", -1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch."""
        self._note(
            f"the gradient of micro-batch {bwd_chunk_id} from stage {self.stage_index + 1}", 1
        )
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _note(self, what: str, direction: int) -> None:
        peer = self.stage_index_to_group_rank.get(self.stage_index + direction)
        if peer is not None and peer != self.group_rank:
            self.waits_for = f"{what} on rank {peer}"


def outputs_of(stage: StageModule) -> tuple[torch.Tensor, ...]:
    """Return fake tensors of the stage's results: the sent values, or the module's outputs."""
    if stage.sent:
        return stage.sent
    output = next(n for n in stage.module.graph.nodes if n.op == "output")
    made = [n.meta["val"] for n in output.args[0]]
    return tuple(
        made[s.value] if s.kind == "made" else stage.received[s.value]
        for s in stage.outputs
        if s.kind != "constant"
    )


def _samples(fakes: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return meta tensors for the engine that describe the sent values; all may need gradients."""
    return tuple(
        torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device="meta").requires_grad_(
            f.dtype.is_floating_point
        )
        for f in fakes
    )
