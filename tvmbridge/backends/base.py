"""The interface of a backend, and the passes that all backends share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.passes.relax.copy_pieces import CopyPieces
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.dispatch_convolutions import DispatchConvolutions
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels
from tvmbridge.passes.relax.empty_constants import EmptyConstants
from tvmbridge.passes.relax.fuse_ops import FuseOps
from tvmbridge.passes.relax.legalize_ops import LegalizeOps
from tvmbridge.passes.relax.repeat_casts import RepeatCasts
from tvmbridge.passes.relax.rewrite_dataflow_reshape import RewriteDataflowReshape
from tvmbridge.pipeline import AnyPass, tidy_passes


@dataclass(frozen=True)
class Backend:
    """The functions that compile and load code for one type of device.

    - ``kinds``: the kinds of TVM targets that the backend compiles for.
    - ``default_target``: returns the target for the device that the module is on.
    - ``kernel_passes``: returns the passes that turn Relax operators into loops and kernel calls.
      The argument says whether kernels may be chosen by measurement.
    - ``allocation_passes``: returns the passes that allocate the memory of tensors, once kernel
      calls are in destination-passing style.
    - ``schedule``: schedules the functions of a module that have no tuning record.
    - ``tuned``: whether tuning records are used for this type of device.
    - ``left_out``: names of TVM's passes that do not run in a build for the device.
    - ``prepare``: registers the functions that TVM needs, before it compiles.
    - ``device``: returns TVM's device for a PyTorch device.
    - ``identity``: returns all that code depends on beside its target, for the cache key.
    - ``settings``: read the settings of PyTorch that choose among kernels with other roundings.
    - ``name``: returns the name of a device among those of one type; empty if all are alike.
    - ``on_stream``: returns a compiled function that runs on PyTorch's current stream.
    - ``synchronize``: waits for the work that a device was given.
    - ``graph_passes``: returns the passes that the device's libraries need before a joint function
      is split, or in inference before the build. The arguments are the module, whether there is
      a backward, and whether kernels may be measured.
    - ``residual_policy``: the policy that ``"auto"`` stands for.
    - ``warm_up``: the number of calls in which code and libraries prepare themselves.
    - ``long_call``: the seconds from which a call of compiled code has no speed trial.
    - ``freezes``: whether weights may be frozen.
    - ``packs``: whether weights may be moved side by side.
    - ``replays``: whether calls may be replayed as CUDA graphs.
    - ``runs_alone``: whether code can run without PyTorch, or operator by operator.
    - ``redraws``: whether forward can draw the random numbers of a call once more.
    - ``norms_in_loops``: whether loops of norms are as fast as PyTorch's kernels.
    - ``drops_in_float32``: whether PyTorch's dropout scales half precision in float32.
    - ``on_host``: whether tensors are in the host's memory, so that Python reads values at once.
    - ``generators``: returns the default random generators of a device, beside the CPU's.
    - ``recurs_by_onednn``: whether recurrent layers may be oneDNN's.
    - ``moves_in_bfloat16``: whether batch norm moves bfloat16 statistics in bfloat16.
    - ``stays_at_exit``: whether loaded code must not be freed while the process ends.
    - ``timed_calls``: the number of calls whose mean time is that of one call.
    - ``draws_by_strides``: whether dropout's mask depends on its input's dtype and strides, so that
      PyTorch's own kernel must make it.
    """

    kinds: tuple[str, ...]
    default_target: Callable[[torch.device], tvm.target.Target]
    kernel_passes: Callable[[bool], list[AnyPass]]
    allocation_passes: Callable[[], list[AnyPass]]
    schedule: Callable[[tvm.IRModule, tvm.target.Target], tvm.IRModule]
    tuned: bool
    left_out: list[str]
    prepare: Callable[[], None]
    device: Callable[[torch.device], Any]
    identity: Callable[[torch.device], str]
    settings: tuple[Callable[[], Any], ...]
    name: Callable[[torch.device], str]
    on_stream: Callable[[Callable[..., Any], torch.device], Callable[..., Any]]
    synchronize: Callable[[torch.device], None]
    graph_passes: Callable[[tvm.IRModule, bool, bool], list[AnyPass]]
    residual_policy: str
    warm_up: int
    long_call: float
    freezes: bool
    packs: bool
    replays: bool
    runs_alone: bool
    redraws: bool
    norms_in_loops: bool
    drops_in_float32: bool
    draws_by_strides: bool
    on_host: bool
    generators: Callable[[torch.device], list[torch.Generator]]
    recurs_by_onednn: bool
    moves_in_bfloat16: bool
    stays_at_exit: bool
    timed_calls: int


def kernel_passes(
    products: DispatchKernels,
    *before_legalizing: AnyPass,
    casts: RepeatCasts = RepeatCasts(),  # noqa: B008
    fuse: FuseOps = FuseOps(),  # noqa: B008
) -> list[AnyPass]:
    """Return the passes from Relax operators to kernel calls and unscheduled fused functions.

    Args:
        before_legalizing: passes of the backend that run before operators become loops.
    """
    return [
        products,
        DispatchConvolutions(),
        CopyPieces(),
        *tidy_passes(),
        *before_legalizing,
        CollapseViews(),
        casts,
        LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        DeadCodeElimination(),
        # A folded constant has one size, so nothing is folded if sizes vary.
        *([] if sizes_vary() else [relax.transform.FoldConstant()]),
        DeadCodeElimination(),
        fuse,
        relax.transform.FuseTIR(),
        # This pass recognises reshapes by their loops, which scheduling would change.
        RewriteDataflowReshape(),
        EmptyConstants(),
        DeadCodeElimination(),
    ]
