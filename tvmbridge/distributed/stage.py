"""One stage at work: what the engine of PyTorch calls for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from tvmbridge.core.devices import gpus_of
from tvmbridge.core.errors import PipelineError, first_line
from tvmbridge.distributed.splitting import OutputSource, StageModule

# Seeds are mixed by multiplication with odd numbers, and kept within 63 bits.
_MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_SEED_BITS = (1 << 63) - 1


def seed_of(seed: int, step: int, microbatch: int, stage: int) -> int:
    """The seed of the draws of one stage for one micro-batch of one step."""
    mixed = seed
    for number, mixer in zip((step, microbatch, stage), _MIXERS, strict=True):
        mixed = ((mixed ^ (number + 1)) * mixer) & _SEED_BITS
        mixed ^= mixed >> 29
    return mixed


class MicrobatchInputs:
    """The flattened inputs of the step's micro-batches, as the stages of a rank find them."""

    def __init__(self) -> None:
        self.leaves: Sequence[Sequence[Any]] = ()
        self.step = 0
        self.seed = 0


class StageForward(nn.Module):
    """Runs a stage's module on what was received and on its share of the inputs.

    ``module`` may be dispatched. Draws come from a generator that is seeded for each micro-batch,
    and the process's own generator is left as it was.
    """

    def __init__(self, stage: StageModule, device: torch.device, inputs: MicrobatchInputs) -> None:
        super().__init__()
        self.module = stage.module
        self.stage = stage
        self.device = device
        self.inputs = inputs
        self.microbatch = 0

    def forward(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the stage sends on, or the outputs of the whole module."""
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
    """The leaves of the module's outputs from the tensors that the last stage returned."""
    rest = iter(tensors)
    return [s.value if s.kind == "constant" else next(rest) for s in outputs]


class EngineStage(PipelineStage):
    """A stage of PyTorch's engine that knows its micro-batch and what it waits for.

    ``waits_for`` says which value it asked for last, for an error; with ``marks`` each piece of
    work is a range of torch.profiler's, ``F0.3`` for the forward of micro-batch 3 in stage 0, and
    on a GPU ``events`` has its name with events before and behind it. ``begins`` is called first.
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
        """Say that work begins, and of an error where it came up."""
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
        """Forward of one micro-batch."""
        self.runs.microbatch = fwd_chunk_id
        with self._mark("F", fwd_chunk_id), self._named("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Backward of one micro-batch; an absent gradient is sent as zeros."""
        with self._mark("B", bwd_chunk_id), self._named("backward", bwd_chunk_id):
            received = self.args_recv_info[bwd_chunk_id]
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache.get(bwd_chunk_id)
        if gradients is not None and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(info.buffer) if g is None and info.buffer is not None else g
                for g, info in zip(gradients, received, strict=False)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The gradients of the parameters, where a schedule computes them apart."""
        with self._mark("W", bwd_chunk_id), self._named("backward", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the inputs of a micro-batch."""
        self._note(f"micro-batch {fwd_chunk_id} from stage {self.stage_index - 1}", -1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the gradients of a micro-batch."""
        self._note(
            f"the gradient of micro-batch {bwd_chunk_id} from stage {self.stage_index + 1}", 1
        )
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _note(self, what: str, direction: int) -> None:
        peer = self.stage_index_to_group_rank.get(self.stage_index + direction)
        if peer is not None and peer != self.group_rank:
            self.waits_for = f"{what} on rank {peer}"


def outputs_of(stage: StageModule) -> tuple[torch.Tensor, ...]:
    """Fake tensors of what the stage returns: what it sends, or the outputs of the module."""
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
    """Tensors without memory, which say what is sent: all of it may need a gradient."""
    return tuple(
        torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device="meta").requires_grad_(
            f.dtype.is_floating_point
        )
        for f in fakes
    )
