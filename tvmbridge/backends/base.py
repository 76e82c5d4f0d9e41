"""What compilation asks of a backend."""

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
    """One kind of device, as compilation and loading see it.

    Args:
        kinds: the kinds of TVM targets that it compiles for.
        default_target: the target for the device that the module is on.
        kernel_passes: from Relax operators to loops and calls of kernels; whether kernels may be
            chosen by measurement.
        allocation_passes: from tensors to allocations, after kernels write into given results.
        schedule: gives functions without a tuning record their loops.
        tuned: whether tuning records are made for it.
        prepare: registers what TVM needs before it compiles.
        device: TVM's device for PyTorch's.
        identity: what code for the device depends on beside its target, for the key of the cache.
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
    """From Relax operators to calls of kernels and fused functions, which are not scheduled yet."""
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
        # A constant has one size.
        *([] if sizes_vary() else [relax.transform.FoldConstant()]),
        DeadCodeElimination(),
        FuseOps(),
        relax.transform.FuseTIR(),
        # Recognises reshapes by their loops, so it must see them before they are scheduled.
        RewriteDataflowReshape(),
        DeadCodeElimination(),
    ]
