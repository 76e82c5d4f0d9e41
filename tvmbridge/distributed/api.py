"""``pipeline``: train a module over several devices, from a script that runs on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tvmbridge.core.errors import BridgeError, PipelineError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.torch_private import pytree
from tvmbridge.distributed.control import Control, has_nccl
from tvmbridge.distributed.graph import PipelineGraph, capture_graph, value_of
from tvmbridge.distributed.plan import (
    MicroBatch,
    Plan,
    PlanRequest,
    Stages,
    count_stages,
    make_plan,
)
from tvmbridge.distributed.runner import PipelineRunner, RunnerSettings


def pipeline(
    module: nn.Module,
    sample: Any,
    *,
    microbatches: int,
    schedule: str = "interleaved",
    stages: Stages = None,
    devices: Sequence[torch.device | str] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    seed: int = 0,
    tvm: bool = True,
    options: CompileOptions | dict[str, Any] | None = None,
    target: Any = None,
    memory: int | None = None,
    timeout: float = 300.0,
    check_batches: bool = True,
) -> PipelineRunner:
    """Cut ``module`` into stages over the ranks, compile each stage, and return the runner.

    Each rank runs the same script and calls this function with the same arguments, under
    ``torchrun`` or with a process group of its own. A single process runs all stages itself.

    Args:
        module: the module in train mode, with equal weights on every rank.
        sample: a mini-batch as :meth:`PipelineRunner.step` takes it. Later mini-batches must have
            its shapes.
        microbatches: the number of micro-batches that a mini-batch is cut into.
        schedule: ``"interleaved"``: backward first whenever possible; ``"simple"``: all forwards,
            then all backwards; ``"zero_bubble"``: a rank that would wait computes gradients of
            weights instead.
        stages: the number of stages, a multiple of the number of ranks; or a list with the names
            of the submodules that begin the second and all later stages; or a dict from names of
            submodules to stages, which leaves the other cuts to the search. None: one stage a
            rank. Stage ``i`` is on rank ``i % ranks``.
        devices: the device of each rank. None: ``cuda:LOCAL_RANK`` where there are GPUs and the
            process group uses NCCL, otherwise the CPU.
        loss: computes the mean loss of a micro-batch from the module's output and the
            micro-batch's targets. None: the module returns its loss.
        seed: the seed of the random draws of dropout, which differ by step, micro-batch and stage.
        tvm: whether the stages are compiled; False runs them in eager PyTorch.
        options: options of the compilation, as for :func:`tvmbridge.add_tvm_dispatch`.
        target: a TVM target; None is the target of the device.
        memory: bytes that a device has for parameters, gradients, optimizer state (as of Adam) and
            activations. None: no limit on the CPU, all memory of a GPU.
        timeout: seconds that a rank waits for another.
        check_batches: whether the ranks compare their batches at each step.

    Raises:
        PipelineError: the module cannot be cut in this way, the ranks do not agree, or a rank did
            not come.
        CaptureError: torch.export cannot capture the module.
    """
    chosen_options = CompileOptions.of(options)
    _join(timeout)
    control = Control(timeout)
    device = _device(devices, control)
    if device.type == "cuda":
        # NCCL uses the current GPU, which would be the first one on every rank.
        torch.cuda.set_device(device)
    error: BridgeError | None = None
    graph, chosen = None, None
    try:
        chosen, args, kwargs = MicroBatch.of(sample, microbatches)
        graph = capture_graph(module, args, kwargs)
        wanted = count_stages(stages, control.size)
    except BridgeError as problem:
        error = problem
    control.agree(error, "the pipeline cannot be built")
    assert graph is not None
    assert chosen is not None
    _compare_graphs(graph, control)
    limit = memory if memory is not None else _memory_of(device)
    plan: Plan | None = None
    if control.rank == 0:
        try:
            request = PlanRequest(schedule, microbatches, stages, wanted, control.size)
            plan = make_plan(graph, chosen, request, device, limit)
        except BridgeError as problem:
            error = problem
    control.agree(error, "the pipeline cannot be built")
    plan = control.share(plan)
    assert plan is not None
    settings = RunnerSettings(loss, seed, tvm, chosen_options, target, check_batches)
    return PipelineRunner(module, graph, plan, chosen, control, device, settings)


def _join(timeout: float) -> None:
    """Initialize a process group unless there is one: torchrun's, or one of this process alone."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        backend = "nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        raise PipelineError(
            f"rank {rank} waited {timeout:g} s for {size} ranks, a stage on each, and not all "
            f"came: {error}"
        ) from error


def _device(devices: Sequence[torch.device | str] | None, control: Control) -> torch.device:
    if devices is not None:
        if len(devices) != control.size:
            raise PipelineError(
                f"{len(devices)} devices for {control.size} ranks: each rank runs one; start as "
                f"many processes as devices, with torchrun --nproc-per-node {len(devices)}"
            )
        return torch.device(devices[control.rank])
    if torch.cuda.is_available() and has_nccl():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", control.rank)))
    return torch.device("cpu")


def _memory_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _told(value: Any) -> str:
    """Describe a node's value by dtype and shape, without the device, which differs by rank."""
    leaves = pytree.tree_leaves(value)
    return ", ".join(
        f"{v.dtype} {list(v.shape)}" if isinstance(v, torch.Tensor) else str(v) for v in leaves
    )


def _compare_graphs(graph: PipelineGraph, control: Control) -> None:
    """Check that all ranks captured the same graph with the same shapes."""
    text = [f"{n.name} {n.target} {_told(value_of(n))}" for n in graph.nodes]
    found = control.gather(text, "to compare their modules")
    for rank, other in enumerate(found):
        if other != found[0]:
            pairs = zip([*found[0], "nothing"], [*other, "nothing"], strict=False)
            first, here = next((a, b) for a, b in pairs if a != b)
            raise PipelineError(
                f"{control.describe(rank)} has another module or sample than rank 0, which has "
                f"{first} where it has {here}"
            )
