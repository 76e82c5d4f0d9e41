"""The CPU: LLVM, loops on PyTorch's threads, MKL and oneDNN through PyTorch."""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax

from tvmbridge.backends.base import Backend, kernel_passes
from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.kernel_settings import precision_reader
from tvmbridge.kernels.channels_last import faster_with_channels_last
from tvmbridge.legalize.fences import fence_arithmetic
from tvmbridge.passes.relax.channels_last import ChannelsLast, has_convolutions
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls
from tvmbridge.passes.relax.convolutions_in_loops import ConvolutionsInLoops
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels
from tvmbridge.passes.relax.few_channel_gradients import FewChannelGradients
from tvmbridge.passes.relax.merge_kernels import MergeKernels
from tvmbridge.passes.relax.results_early import ResultsEarly
from tvmbridge.passes.relax.sliced_gradients import SlicedGradients
from tvmbridge.pipeline import AnyPass, tidy_passes
from tvmbridge.schedules import alone, schedule_for_cpu
from tvmbridge.schedules.target import host_target
from tvmbridge.schedules.threads import share_torch_threads


def _kernel_passes(measure: bool) -> list[AnyPass]:
    # A bias is not given to the product's kernel, where it costs a pass over the result. TVM adds
    # it at no cost in the fused kernel that follows the product.
    products = DispatchKernels(measure=measure)
    convolutions = SlicedGradients(), FewChannelGradients(measure), ConvolutionsInLoops(measure)
    passes = kernel_passes(products, *convolutions, CompileAtenCalls())
    # Sizes decide which kernels to merge, and in which order to run them.
    by_size = [] if sizes_vary() else [MergeKernels(), DeadCodeElimination(), ResultsEarly()]
    return [*passes, *by_size]


def _graph_passes(mod: tvm.IRModule, has_backward: bool, measure: bool) -> list[AnyPass]:
    # Not the passes of GPUs for casts: products read packed weights, which other passes create from
    # casts of permutations.
    if not measure or sizes_vary() or not has_convolutions(mod):
        return []
    choose = partial(faster_with_channels_last, has_backward=has_backward, make=alone.convolution)
    return [ChannelsLast(("float32",), choose), *tidy_passes()]


def _prepare() -> None:
    share_torch_threads()
    fence_arithmetic()


CPU = Backend(
    kinds=("llvm",),
    default_target=lambda device: host_target(),
    kernel_passes=_kernel_passes,
    allocation_passes=lambda: [relax.transform.StaticPlanBlockMemory()],
    schedule=schedule_for_cpu,
    tuned=True,
    left_out=[],
    prepare=_prepare,
    device=lambda device: tvm.cpu(),
    identity=lambda device: device.type,
    settings=(precision_reader("cpu"),),
    name=lambda device: "",
    on_stream=lambda function, device: function,
    synchronize=lambda device: None,
    graph_passes=_graph_passes,
    residual_policy="keep_casts",
    warm_up=2,
    # Longer calls may need memory that only compiled code spares.
    long_call=5.0,
    freezes=True,
    packs=True,
    replays=False,
    runs_alone=True,
    redraws=True,
    norms_in_loops=False,
    drops_in_float32=False,
    draws_by_strides=False,
    on_host=True,
    generators=lambda device: [],
    recurs_by_onednn=True,
    moves_in_bfloat16=True,
    stays_at_exit=False,
    timed_calls=1,
)
