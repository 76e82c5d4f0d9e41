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
    - ``prepare``: registers the functions that TVM needs, before it compiles.
    - ``device``: returns TVM's device for a PyTorch device.
    - ``identity``: returns all that code depends on beside its target, for the cache key.
    """

    kinds: tuple[str, ...]
    default_target: Callable[[torch.device], tvm.target.Target]
    kernel_passes: Callable[[bool], list[AnyPass]]
    allocation_passes: Callable[[], list[AnyPass]]
    schedule: Callable[[tvm.IRModule, tvm.target.Target], tvm.IRModule]
    tuned: bool
    prepare: Callable[[], None]
    device: Callable[[torch.device], Any]
    identity: Callable[[torch.device], str]


def kernel_passes(
    products: DispatchKernels,
    *before_legalizing: AnyPass,
    casts: RepeatCasts = RepeatCasts(),  # noqa: B008
) -> list[AnyPass]:
    """Return the passes from Relax operators to kernel calls and unscheduled fused functions.

    Args:
        products: the pass that replaces matrix products by kernel calls.
        before_legalizing: passes of the backend that run before operators become loops.
        casts: the pass that repeats casts and light functions for each of their readers.
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
        FuseOps(),
        relax.transform.FuseTIR(),
        # This pass recognises reshapes by their loops, which scheduling would change.
        RewriteDataflowReshape(),
        DeadCodeElimination(),
    ]
