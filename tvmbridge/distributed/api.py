"""``pipeline``: a module trained over several devices, from a script that runs on every rank."""

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
from tvmbridge.distributed.plan import MicroBatch, Plan, Stages, count_stages, make_plan
from tvmbridge.distributed.runner import PipelineRunner


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
    """Cut ``module`` into stages over the ranks, compile each, and return what trains it.

    Each rank runs the same script and calls this with the same arguments, under ``torchrun`` or
    with a process group of its own; a single process has all stages itself.

    Args:
        module: in train mode, with equal weights on every rank.
        sample: a mini-batch as :meth:`PipelineRunner.step` takes it. Later ones have its shapes.
        microbatches: into how many micro-batches a mini-batch is cut.
        schedule: ``"interleaved"``: backward first whenever possible; ``"simple"``: all forwards,
            then all backwards; ``"zero_bubble"``: gradients of weights where a rank would wait.
        stages: how many, a multiple of the ranks; or the names of submodules that begin the second
            stage and those behind it; or stages of submodules by name, around which others are
            chosen. None: one a rank. Stage ``i`` is on rank ``i % ranks``.
        devices: of each rank. None: ``cuda:LOCAL_RANK`` where there are GPUs and the process group
            is NCCL's, otherwise the CPU.
        loss: of a micro-batch, from the module's output and its share of the targets, as a mean.
            None: the module returns its loss.
        seed: of the draws of dropout. They differ by step, micro-batch and stage.
        tvm: compile the stages; False leaves them to eager PyTorch.
        options: of the compilation, as for :func:`tvmbridge.add_tvm_dispatch`.
        target: a TVM target; None is the device's own.
        memory: bytes that a device has for parameters, gradients, optimizer state (as of Adam) and
            activations. None: no limit on the CPU, all of a GPU's.
        timeout: seconds that a rank waits for another.
        check_batches: compare the batches of the ranks at each step.

    Raises:
        PipelineError: the module cannot be cut so, the ranks do not agree, or one did not come.
        CaptureError: torch.export cannot capture the module.
    """
    chosen_options = CompileOptions.of(options)
    _join(timeout)
    control = Control(timeout)
    device = _device(devices, control)
    if device.type == "cuda":
        # NCCL takes the current one, which would be the first GPU on every rank.
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
            plan = make_plan(
                graph, chosen, schedule, microbatches, stages, wanted, control.size, device, limit
            )
        except BridgeError as problem:
            error = problem
    control.agree(error, "the pipeline cannot be built")
    plan = control.share(plan)
    assert plan is not None
    return PipelineRunner(
        module, graph, plan, chosen, control, device=device, loss=loss, seed=seed, tvm=tvm,
        options=chosen_options, target=target, check_batches=check_batches,
    )  # fmt: skip


def _join(timeout: float) -> None:
    """Have a process group: the one that there is, torchrun's, or one of this process alone.

    Raises:
        PipelineError: a rank did not come within the timeout.
    """
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
    """What a node makes; not on which device, where each rank has its own."""
    leaves = pytree.tree_leaves(value)
    return ", ".join(
        f"{v.dtype} {list(v.shape)}" if isinstance(v, torch.Tensor) else str(v) for v in leaves
    )


def _compare_graphs(graph: PipelineGraph, control: Control) -> None:
    """All ranks must have captured the same graph with the same shapes.

    Raises:
        PipelineError: a rank has another module or sample.
    """
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
