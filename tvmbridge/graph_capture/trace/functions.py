"""Enter all replacements of PyTorch functions that every trace of forward needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from tvmbridge.calls.patches import table_patched_here

# Imported because these modules register handlers and patches.
from tvmbridge.graph_capture.trace import (  # noqa: F401
    attention,
    cumulative,
    empties,
    extremes,
    fills,
    linear_algebra,
    modes,
    opaque_ops,
    pools,
    promotion,
    recurrent,
    regions,
    rephrased,
    sized_functions,
)
from tvmbridge.graph_capture.trace.checkpoints import plain_checkpoints
from tvmbridge.graph_capture.trace.conversions import checks_of_numbers
from tvmbridge.graph_capture.trace.fast_paths import causal_masks_undetected
from tvmbridge.graph_capture.trace.function_table import FunctionTable
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels
from tvmbridge.graph_capture.trace.uniforms import UniformComparisons
from tvmbridge.graph_capture.trace.written_attention import written_attention_fused


@contextmanager
def functions_replaced(module: nn.Module, *, on_fakes: bool) -> Iterator[None]:
    """Replace functions that a trace would misrepresent, within the context.

    Args:
        on_fakes: whether forward runs on fake tensors with autograd as in eager PyTorch; False if
            torch.export traces it.
    """
    with ExitStack() as stack:
        if on_fakes:
            stack.enter_context(plain_checkpoints(module))
            stack.enter_context(checks_of_numbers())
        stack.enter_context(strides_of_kernels())
        stack.enter_context(table_patched_here(module))
        stack.enter_context(causal_masks_undetected(module))
        # The mode that is entered last sees a function first.
        stack.enter_context(FunctionTable())
        stack.enter_context(UniformComparisons())
        stack.enter_context(written_attention_fused(module))
        yield
