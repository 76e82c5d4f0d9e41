"""What forward runs within wherever it is traced, so that every trace sees the same functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tvmbridge.checkpoints import plain_checkpoints
from tvmbridge.conversions import checks_of_numbers, conversions_without_effect
from tvmbridge.cumulative import cumulative_averages_on_tensors
from tvmbridge.empties import FunctionsOfNothing
from tvmbridge.fast_paths import fast_paths_taken_apart
from tvmbridge.fills import FillsByMask
from tvmbridge.promotion import KernelPromotion
from tvmbridge.recurrent import RecurrentLayersKeptWhole
from tvmbridge.rephrased import FunctionsRephrased
from tvmbridge.standins import as_captured
from tvmbridge.uniforms import UniformComparisons
from tvmbridge.whole import FunctionsKeptWhole


@contextmanager
def functions_replaced(module: nn.Module) -> Iterator[None]:
    """Within it functions that a trace would take for something else are called by their stand-ins.

    Args:
        module: what is traced.
    """
    with (
        # First, so that it is asked last: what it calls the others do not see.
        RecurrentLayersKeptWhole(),
        cumulative_averages_on_tensors(module),
        conversions_without_effect(),
        KernelPromotion(),
        FunctionsKeptWhole(),
        FillsByMask(),
        FunctionsOfNothing(),
        FunctionsRephrased(),
        UniformComparisons(),
        fast_paths_taken_apart(module),
    ):
        yield


@contextmanager
def run_on_fakes(module: nn.Module) -> Iterator[None]:
    """Within it forward runs on fake tensors as it is exported, with autograd as in eager."""
    with (
        plain_checkpoints(),
        as_captured(),
        checks_of_numbers(),
        functions_replaced(module),
    ):
        yield
