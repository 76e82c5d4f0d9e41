"""NVIDIA and AMD GPUs: TVM generates kernels.

PyTorch's kernels compute matrix products, convolutions and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
import tvm_ffi
from tvm import relax

from tvmbridge.backends.base import Backend, kernel_passes
from tvmbridge.backends.cuda.bits import register_bits
from tvmbridge.backends.cuda.identity import gpu_identity
from tvmbridge.backends.cuda.rocm import register_rocm
from tvmbridge.backends.cuda.source import arch_of, register_compiler
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.devices import gpu_index
from tvmbridge.core.kernel_settings import attention_switched_off, precision_reader
from tvmbridge.core.torch_private import current_raw_stream
from tvmbridge.legalize.aten import FOR_GPUS
from tvmbridge.legalize.fences import fence_arithmetic
from tvmbridge.passes.relax.allocate_by_torch import AllocateByTorch
from tvmbridge.passes.relax.batch_norms_last import BatchNormsLast
from tvmbridge.passes.relax.cast_first import CastFirst
from tvmbridge.passes.relax.channels_last import ChannelsLast
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels
from tvmbridge.passes.relax.few_row_products import FewRowProducts
from tvmbridge.passes.relax.fuse_cross_entropy import FuseCrossEntropy
from tvmbridge.passes.relax.fuse_ops import MOST_ON_GPUS, FuseOps
from tvmbridge.passes.relax.merge_casts import MergeCasts
from tvmbridge.passes.relax.merge_kernels import MergeKernels
from tvmbridge.passes.relax.pad_products import PadProducts
from tvmbridge.passes.relax.read_views import ReadViews
from tvmbridge.passes.relax.repeat_casts import CHEAP_ON_GPUS, RepeatCasts
from tvmbridge.passes.relax.results_early import ResultsEarly
from tvmbridge.passes.relax.table_gradients import TableGradients
from tvmbridge.pipeline import AnyPass, tidy_passes
from tvmbridge.schedules.gpu import is_one_kernel, schedule_for_gpu
from tvmbridge.schedules.target import host_target


def _target(device: torch.device) -> tvm.target.Target:
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return tvm.target.Target({"kind": "rocm", "mcpu": arch}, host=host_target())
    return tvm.target.Target({"kind": "cuda", "arch": arch_of(device)}, host=host_target())


def _kernel_passes(measure: bool) -> list[AnyPass]:
    ours = FewRowProducts(), PadProducts(), TableGradients(), BatchNormsLast()
    shared = kernel_passes(
        DispatchKernels(),
        CompileAtenCalls(FOR_GPUS),
        casts=RepeatCasts(CHEAP_ON_GPUS),
        fuse=FuseOps(MOST_ON_GPUS),
    )
    # Sizes decide which kernels to merge, and in which order to run them.
    merges = MergeKernels(is_one_kernel), MergeCasts(is_one_kernel), DeadCodeElimination()
    by_size = [relax.transform.CanonicalizeBindings(), *merges, ResultsEarly()]
    return [*ours, *shared, *([] if sizes_vary() else by_size)]


def _graph_passes(_: tvm.IRModule, has_backward: bool, measure: bool) -> list[AnyPass]:
    passes: list[AnyPass] = [CastFirst(), *tidy_passes()]
    losses = [FuseCrossEntropy()] if has_backward else []
    return [*passes, ReadViews(), *losses, ChannelsLast(), CollapseViews(), *tidy_passes()]


def _allocation_passes() -> list[AnyPass]:
    return [relax.transform.StaticPlanBlockMemory() if runs_alone() else AllocateByTorch()]


def _prepare() -> None:
    register_compiler()
    register_bits()
    register_rocm()
    fence_arithmetic()


def _device(device: torch.device) -> tvm.runtime.Device:
    index = gpu_index(device)
    return tvm.rocm(index) if torch.version.hip else tvm.cuda(index)


def _on_stream(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    index = gpu_index(device)
    on_device = tvm_ffi.device("rocm" if torch.version.hip else "cuda", index)

    def call(*arguments: Any) -> Any:
        with tvm_ffi.use_raw_stream(on_device, current_raw_stream(index)):
            return function(*arguments)

    return call


CUDA = Backend(
    kinds=("cuda", "rocm"),
    default_target=_target,
    kernel_passes=_kernel_passes,
    allocation_passes=_allocation_passes,
    schedule=schedule_for_gpu,
    tuned=False,
    # It takes two thirds of lowering, and changes no kernel: the schedules simplify indices.
    left_out=["s_tir.RenormalizeSplitPattern"],
    prepare=_prepare,
    device=_device,
    identity=gpu_identity,
    settings=(precision_reader("cuda"), attention_switched_off),
    name=lambda device: torch.cuda.get_device_name(device),
    on_stream=_on_stream,
    synchronize=lambda device: torch.cuda.synchronize(device),
    graph_passes=_graph_passes,
    residual_policy="keep_operands",
    warm_up=4,  # a CUDA graph is captured as well
    # Such models were 1.3 to 8.8 times as fast as eager PyTorch, whose call may need more memory.
    long_call=0.005,
    freezes=False,
    packs=False,
    replays=True,
    runs_alone=False,
    redraws=False,
    norms_in_loops=True,
    drops_in_float32=True,
    draws_by_strides=True,
    on_host=False,
    generators=lambda device: [torch.cuda.default_generators[gpu_index(device)]],
    recurs_by_onednn=False,
    moves_in_bfloat16=False,
    stays_at_exit=True,
    timed_calls=8,  # launching and waiting would dominate the time of a single call
)

__all__ = ["CUDA"]
