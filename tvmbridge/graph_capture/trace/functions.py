"""Everything of PyTorch that is replaced while forward is traced, the same in every trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

# Imported for the handlers and patches that they enter into the tables.
from tvmbridge.graph_capture.trace import (  # noqa: F401
    attention,
    cumulative,
    empties,
    extremes,
    fills,
    linear_algebra,
    opaque_ops,
    promotion,
    recurrent,
    regions,
    rephrased,
)
from tvmbridge.graph_capture.trace.checkpoints import plain_checkpoints
from tvmbridge.graph_capture.trace.conversions import checks_of_numbers
from tvmbridge.graph_capture.trace.fast_paths import causal_masks_undetected
from tvmbridge.graph_capture.trace.function_table import FunctionTable
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels
from tvmbridge.graph_capture.trace.patches import table_patched_here
from tvmbridge.graph_capture.trace.uniforms import UniformComparisons


@contextmanager
def functions_replaced(module: nn.Module, *, on_fakes: bool) -> Iterator[None]:
    """Within it functions that a trace would misrepresent are replaced.

    Args:
        module: what is traced.
        on_fakes: forward runs on fake tensors with autograd as in eager, and not in torch.export.
    """
    with ExitStack() as stack:
        if on_fakes:
            stack.enter_context(plain_checkpoints())
            stack.enter_context(checks_of_numbers())
        stack.enter_context(strides_of_kernels())
        stack.enter_context(table_patched_here(module))
        stack.enter_context(causal_masks_undetected(module))
        # The mode that is entered last is asked first.
        stack.enter_context(FunctionTable())
        stack.enter_context(UniformComparisons())
        yield
