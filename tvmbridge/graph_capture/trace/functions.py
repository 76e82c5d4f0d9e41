"""What forward runs within wherever it is traced, so that every trace sees the same functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tvmbridge.graph_capture.trace.checkpoints import plain_checkpoints
from tvmbridge.graph_capture.trace.conversions import checks_of_numbers, conversions_without_effect
from tvmbridge.graph_capture.trace.cumulative import cumulative_averages_on_tensors
from tvmbridge.graph_capture.trace.empties import FunctionsOfNothing
from tvmbridge.graph_capture.trace.extremes import ExtremesOfAll
from tvmbridge.graph_capture.trace.fast_paths import fast_paths_taken_apart
from tvmbridge.graph_capture.trace.fills import FillsByMask
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels
from tvmbridge.graph_capture.trace.linear_algebra import LinearAlgebraChecked
from tvmbridge.graph_capture.trace.numbers import NumbersOutOfRange
from tvmbridge.graph_capture.trace.opaque_ops import FunctionsKeptWhole
from tvmbridge.graph_capture.trace.promotion import KernelPromotion
from tvmbridge.graph_capture.trace.recurrent import RecurrentLayersKeptWhole
from tvmbridge.graph_capture.trace.rephrased import FunctionsRephrased
from tvmbridge.graph_capture.trace.standins import as_captured
from tvmbridge.graph_capture.trace.uniforms import UniformComparisons


@contextmanager
def functions_replaced(module: nn.Module) -> Iterator[None]:
    """Within it functions that a trace would take for something else are called by their stand-ins.

    Args:
        module: what is traced.
    """
    with (
        # First, so that it is asked last: what it calls the others do not see.
        RecurrentLayersKeptWhole(),
        strides_of_kernels(),
        cumulative_averages_on_tensors(module),
        conversions_without_effect(),
        KernelPromotion(),
        FunctionsKeptWhole(),
        ExtremesOfAll(),
        LinearAlgebraChecked(),
        FillsByMask(),
        FunctionsOfNothing(),
        FunctionsRephrased(),
        UniformComparisons(),
        NumbersOutOfRange(),
        fast_paths_taken_apart(module),
    ):
        yield


@contextmanager
def run_on_fakes(module: nn.Module, is_compiling: bool = True) -> Iterator[None]:
    """Within it forward runs on fake tensors as it is exported, with autograd as in eager.

    Args:
        module: what is run.
        is_compiling: whether it is told that it is traced.
    """
    with (
        plain_checkpoints(),
        as_captured(is_compiling),
        checks_of_numbers(),
        functions_replaced(module),
    ):
        yield
