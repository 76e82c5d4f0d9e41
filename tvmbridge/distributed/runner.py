"""The runner of a pipeline: training steps on all ranks, gradients, state, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import PipelineError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.torch_private import pytree
from tvmbridge.distributed.batches import as_arguments, check_sizes, difference, digest, split
from tvmbridge.distributed.compiling import CompileSettings, compile_stages
from tvmbridge.distributed.control import Control
from tvmbridge.distributed.graph import PipelineGraph
from tvmbridge.distributed.orders import Timeline, engine_class
from tvmbridge.distributed.plan import MicroBatch, Plan
from tvmbridge.distributed.profiling import measured_step
from tvmbridge.distributed.report import PipelineReport, report_of
from tvmbridge.distributed.splitting import StageModule, cut_stage
from tvmbridge.distributed.stage import EngineStage, MicrobatchInputs, StageForward, with_constants
from tvmbridge.distributed.tensors import StageTensors
from tvmbridge.distributed.tied import TiedGradients

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class RunnerSettings:
    """How a pipeline trains; see :func:`pipeline` for the meaning of each field."""

    loss: Loss | None = None
    seed: int = 0
    tvm: bool = True
    options: CompileOptions | None = None
    target: Any = None
    check_batches: bool = True


class PipelineRunner:
    """Trains a module whose stages run on several ranks; :func:`pipeline` creates it.

    ``plan`` holds the stages of ``graph`` and the predicted step; ``measured`` is the timeline of
    the last profiled step. The stages use the parameters of the given module: ``parameters()``
    returns those of this rank, for its optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: PipelineGraph,
        plan: Plan,
        sample: MicroBatch,
        control: Control,
        device: torch.device,
        settings: RunnerSettings,
    ) -> None:
        self.plan = plan
        self.device = device
        self.control = control
        self.measured: Timeline | None = None
        self.graph = graph
        self.sample = sample
        self._loss = settings.loss
        self._check_batches = settings.check_batches
        self._inputs = MicrobatchInputs()
        self._inputs.seed = settings.seed
        self._targets: Sequence[Any] = ()
        self._losses: dict[int, torch.Tensor] = {}
        control.describe = self._described
        ends = [*plan.positions[1:], len(graph.nodes)]
        own = [i for i, s in enumerate(plan.stages) if s.rank == control.rank]
        self._tensors = StageTensors(module, graph)
        self.stages = [cut_stage(graph, i, plan.positions[i], ends[i], device) for i in own]
        for stage in self.stages:
            stage.module.to(device)
            self._tensors.add(stage)
        leaves = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), sample.leaves)
        self.eager: dict[int, str] = {}
        self.equal_to: dict[int, int] = {i: i for i in range(len(plan.stages))}
        if settings.tvm:
            self.eager, self.equal_to = compile_stages(
                self.stages,
                leaves,
                device,
                control,
                CompileSettings(settings.options, settings.target, plan.schedule == "zero_bubble"),
            )
        else:
            self.eager = dict.fromkeys(range(len(plan.stages)), "tvm=False")
        self._tied = TiedGradients(self._tensors, control)
        control.connect(device)
        self._engine_stages = [self._engine_stage(s) for s in self.stages]
        self._schedule = self._made_schedule()

    def _described(self, rank: int) -> str:
        numbers = [str(i) for i, s in enumerate(self.plan.stages) if s.rank == rank]
        return f"rank {rank} (stage {', '.join(numbers)})"

    def _engine_stage(self, stage: StageModule) -> EngineStage:
        forward = StageForward(stage, self.device, self._inputs)
        stages, group = len(self.plan.stages), self.control.data_group
        return EngineStage(forward, stages, group, begins=self.control.launches)

    def _made_schedule(self) -> Any:
        plan = self.plan
        kind = engine_class(plan.schedule, len(plan.stages), plan.ranks, plan.microbatches)
        several = len(plan.stages) > plan.ranks or plan.schedule == "zero_bubble"
        stages: Any = self._engine_stages if several else self._engine_stages[0]
        # The loss is scaled here: the engine would also divide gradients of earlier steps.
        return kind(stages, plan.microbatches, loss_fn=self._scaled_loss, scale_grads=False)

    def _scaled_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Return the loss of one micro-batch over the number of micro-batches."""
        microbatch = int(number.item())
        leaves = with_constants(self.stages[-1].outputs, output)
        result = pytree.tree_unflatten(leaves, self.graph.output_spec)
        if self._loss is None:
            loss = result
        else:
            loss = self._loss(result, self._targets[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise PipelineError(
                "the loss must be a tensor of one element; give loss=, a function of the module's "
                "output and the targets, or a module that returns its loss"
            )
        self._losses[microbatch] = loss.detach()
        return loss.reshape(()) / self.plan.microbatches

    def step(self, inputs: Any, targets: Any = None, *, profile: bool = False) -> torch.Tensor:
        """Run forward and backward of one mini-batch; add to the gradients that are there.

        Args:
            inputs: the same on every rank: a tensor, a tuple of positional arguments, or a dict of
                keyword arguments. Tensors are cut along their first dimension.
            targets: the second argument of the loss; cut in the same way.
            profile: whether to profile the step; ``measured`` is then its timeline.

        Returns:
            The losses of the micro-batches, on the CPU of every rank. The gradients are those of
            their mean.

        Raises:
            PipelineError: the batch cannot be cut, differs between ranks or from the sample, or
                a stage failed. Every rank raises within the timeout.
        """
        self.control.require_open()
        self._set_batch(inputs, targets)
        with self.control.guarded(self._waiting):
            if profile:
                spans = measured_step(self._run, self._engine_stages, self.device)
            else:
                self._run()
            losses = self._shared_losses()
        if profile:
            found = self.control.gather(spans, "for their timelines")
            self.measured = Timeline(tuple(tuple(s) for s in found))
        self._inputs.step += 1
        return losses

    def _set_batch(self, inputs: Any, targets: Any) -> None:
        """Cut the batch into micro-batches, and compare it with the other ranks' batches."""
        problem: PipelineError | None = None
        try:
            self._cut_batch(inputs, targets)
        except PipelineError as error:
            problem = error
        if not self._check_batches:
            if problem is not None:
                raise problem
            return
        mine = (None if problem is None else str(problem), digest((inputs, targets)))
        found = self.control.gather(mine, "for their batches")
        for rank, (told, _) in enumerate(found):
            if told is not None:
                raise problem or PipelineError(f"{self._described(rank)}: {told}")
        for rank, (_, bits) in enumerate(found):
            if bits != found[0][1]:
                raise PipelineError(
                    f"{self._described(rank)} was given another batch than {self._described(0)}: "
                    f"{difference(found[0][1], bits)}"
                )

    def _cut_batch(self, inputs: Any, targets: Any) -> None:
        count = self.plan.microbatches
        flattened = []
        for microbatch in split(inputs, count):
            args, kwargs = as_arguments(microbatch)
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
            if spec != self.sample.spec:
                raise PipelineError("a call passes its inputs in another structure than the sample")
            check_sizes(leaves, self.sample.leaves)
            flattened.append(leaves)
        self._inputs.leaves = [self._moved(leaves) for leaves in flattened]
        last = any(s.index == len(self.plan.stages) - 1 for s in self.stages)
        cut = split(targets, count)
        self._targets = self._moved(cut) if last else ()

    def _moved(self, tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), tree)

    def _run(self) -> None:
        self._losses.clear()
        for stage in self._engine_stages:
            stage.waits_for = ""
        with self.control.launching(), self._tied.added_up():
            numbers = torch.arange(self.plan.microbatches)
            self._schedule.step(target=numbers, return_outputs=False)
        self.control.wait_for(self.device)

    def _shared_losses(self) -> torch.Tensor:
        """Return the losses on every rank, once all ranks have finished the step."""
        order = [self._losses[m].reshape(()) for m in sorted(self._losses)]
        mine = torch.stack(order).cpu() if order else None
        return self.control.gather(mine, "to end the step")[self.plan.stages[-1].rank]

    def _waiting(self) -> str:
        waited = [s.waits_for for s in self._engine_stages if s.waits_for]
        return f"waited for {waited[-1] if waited else self._neighbours()}"

    def _neighbours(self) -> str:
        """Describe the stages on other ranks that exchange tensors with this rank's stages."""
        beside = sorted({s.index + d for s in self.stages for d in (-1, 1)})
        within = [i for i in beside if 0 <= i < len(self.plan.stages)]
        ranks = {i: self.plan.stages[i].rank for i in within}
        names = [f"stage {i} on rank {r}" for i, r in ranks.items() if r != self.control.rank]
        return " or ".join(names) or "its own stages"

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, each once, for an optimizer."""
        return iter(self._tensors.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages with their names in the module."""
        return iter(self._tensors.parameters.items())

    def zero_grad(self) -> None:
        """Set the gradients of this rank's parameters to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, on all ranks, so that their total norm is at most ``max_norm``.

        Returns:
            The total norm before scaling.
        """
        squares = [
            float(torch.linalg.vector_norm(p.grad.double()).square().item())
            for name, p in self.named_parameters()
            if p.grad is not None and self._tied.counts_here(name)
        ]
        parts = self.control.gather(sum(squares), "for the norm of the gradients")
        norm = float(sum(parts) ** 0.5)
        factor = max_norm / (norm + 1e-6)
        # Not `factor < 1`: a norm that is NaN must make the gradients NaN, not leave them as is.
        if not factor >= 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of this rank, by their names in the module."""
        return self._tensors.state_dict(include_unused=self.control.rank == 0)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole module's state, on the CPU of every rank; all ranks call it together."""
        mine = {name: t.detach().cpu() for name, t in self.state_dict().items()}
        whole: dict[str, torch.Tensor] = {}
        for part in self.control.gather(mine, "for their parameters"):
            whole.update(part)
        return {name: whole[name] for name in self._tensors.names if name in whole}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's share of ``state``, the state of the whole module.

        Raises:
            PipelineError: a name is missing, or a tensor has another shape; nothing is changed.
        """
        self._tensors.load(state, include_unused=self.control.rank == 0)

    def close(self) -> None:
        """Free the connections between the ranks; all ranks call it. Parameters stay as they are.

        A process that creates a single pipeline need not call it: its exit frees them as well.
        """
        self.control.close()

    def report(self) -> PipelineReport:
        """Return on every rank which stages TVM serves, and why the others are eager."""
        return report_of(self.stages, self.eager, self.equal_to, self.device, self.control)
