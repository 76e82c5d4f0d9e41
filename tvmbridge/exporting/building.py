"""Build graphs into code that needs TVM's runtime and nothing of PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from tvmbridge.compiler.build import Code, Fused, compile_code, make_ready, schedule
from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.types import PassRecord
from tvmbridge.exporting.aten import SpellOutAtenCalls
from tvmbridge.exporting.convolutions import ConvolutionsAsProducts
from tvmbridge.exporting.epilogues import FuseEpilogues
from tvmbridge.exporting.gpu import is_gpu, refuse_unscheduled, with_traps
from tvmbridge.exporting.gpu_attention import AttentionOnGpu
from tvmbridge.exporting.gpu_products import ProductsOnGpu
from tvmbridge.exporting.leftovers import leftovers, refuse
from tvmbridge.exporting.products import ProductsInLoops
from tvmbridge.exporting.wide_products import WideProducts
from tvmbridge.passes.base import shared_results
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.empty_constants import EmptyConstants
from tvmbridge.passes.relax.fuse_ops import MOST_ON_GPUS, FuseOps
from tvmbridge.passes.relax.legalize_ops import LegalizeOps
from tvmbridge.passes.relax.merge_kernels import MergeKernels
from tvmbridge.passes.relax.repeat_casts import CHEAP_ON_GPUS, RepeatCasts
from tvmbridge.passes.relax.rewrite_dataflow_reshape import RewriteDataflowReshape
from tvmbridge.pipeline import AnyPass, run_passes, tidy_passes
from tvmbridge.schedules.gpu import is_one_kernel
from tvmbridge.schedules.machine import Machine


def prepare_alone(mod: tvm.IRModule, target: tvm.target.Target, records: list[PassRecord]) -> Fused:
    """Return ``mod`` with fused functions in place of all operators, ready to be scheduled.

    Raises:
        ExportError: an operator needs PyTorch.
    """
    make_ready(target)
    given = shared_results(mod, "forward")
    with target:
        mod = run_passes(mod, _spelling_passes(target), records)
        refuse(leftovers(mod["forward"]))
        mod = run_passes(mod, _kernel_passes(target), records)
    refuse(leftovers(mod["forward"]))
    shared = {"forward": given | shared_results(mod, "forward")}
    return Fused(mod, target, {}, shared)


def left_to_pytorch(mod: tvm.IRModule, target: tvm.target.Target) -> list[str]:
    """Return the operators of ``mod`` that need PyTorch, with the lines of the model."""
    make_ready(target)
    forward = tvm.IRModule({"forward": mod["forward"]})
    with target:
        mod = run_passes(forward, _spelling_passes(target), [])
    return leftovers(mod["forward"])


def build_alone(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    records: list[PassRecord],
    *,
    as_graph: bool = False,
) -> Code:
    """Compile ``mod``, whose only function is ``forward``, without calls of PyTorch's kernels.

    ``as_graph``: whether a GPU launches its kernels as one CUDA graph.

    Raises:
        ExportError: an operator needs PyTorch.
        BuildError: TVM cannot compile the module for the target.
    """
    fused = prepare_alone(mod, target, records)
    if is_gpu(target):
        fused = replace(fused, mod=with_traps(fused.mod))
    scheduled = schedule(fused, records)
    if is_gpu(target):
        refuse_unscheduled(scheduled.mod)
    return compile_code(scheduled, records, as_graph=as_graph)


def _spelling_passes(target: tvm.target.Target) -> list[AnyPass]:
    if is_gpu(target):
        return [AttentionOnGpu(), SpellOutAtenCalls(), *tidy_passes()]
    return [SpellOutAtenCalls(), ConvolutionsAsProducts(Machine.of(target)), *tidy_passes()]


def _kernel_passes(target: tvm.target.Target) -> list[Any]:
    gpu = is_gpu(target)
    products = (
        ProductsOnGpu(str(target.attrs["arch"])) if gpu else ProductsInLoops(Machine.of(target))
    )
    casts = RepeatCasts(CHEAP_ON_GPUS) if gpu else RepeatCasts()
    fuse = FuseOps(MOST_ON_GPUS) if gpu else FuseOps()
    merge = MergeKernels(is_one_kernel) if gpu else MergeKernels()
    epilogues = [] if gpu else [FuseEpilogues()]
    merging: list[Any] = [] if sizes_vary() else [merge, DeadCodeElimination()]
    return [
        products,
        WideProducts(),
        *tidy_passes(),
        CompileAtenCalls(),
        CollapseViews(),
        casts,
        LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        DeadCodeElimination(),
        *([] if sizes_vary() else [relax.transform.FoldConstant(), *epilogues]),
        DeadCodeElimination(),
        fuse,
        relax.transform.FuseTIR(),
        RewriteDataflowReshape(),
        EmptyConstants(),
        DeadCodeElimination(),
        *merging,
    ]
