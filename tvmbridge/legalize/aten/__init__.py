"""Loops for ATen operators that Relax has no operator for.

The frontend marks an ATen call as ``compiled`` when :data:`COMPILED` has its operator; the pass
CompileAtenCalls replaces such calls.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import Call, Expr

from tvmbridge.kernels.aten_call import tensors_of
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.distances import DISTANCES
from tvmbridge.legalize.aten.extrema import EXTREMA
from tvmbridge.legalize.aten.folds import FOLDS
from tvmbridge.legalize.aten.histograms import HISTOGRAMS
from tvmbridge.legalize.aten.moves import MOVES
from tvmbridge.legalize.aten.norms import NORMS
from tvmbridge.legalize.aten.padding import PADDING
from tvmbridge.legalize.aten.pointwise import POINTWISE
from tvmbridge.legalize.aten.scans import SCANS
from tvmbridge.legalize.aten.scatters import SCATTERS
from tvmbridge.legalize.aten.sorts import SORTS
from tvmbridge.legalize.aten.upsample import UPSAMPLE
from tvmbridge.legalize.aten.windows import WINDOWS
from tvmbridge.legalize.aten.windows_last import pool_with_channels_last

COMPILED: dict[str, Compile] = {
    **POINTWISE,
    **MOVES,
    **EXTREMA,
    **SCANS,
    **SCATTERS,
    **DISTANCES,
    **HISTOGRAMS,
    **FOLDS,
    **SORTS,
    **UPSAMPLE,
    **WINDOWS,
    **NORMS,
    **PADDING,
}
# Operators that are compiled for GPUs too: their loops run over rows of few arrays, or move
# elements by a fixed pattern.
_MOVED_BY_PATTERN = ("aten.slice_scatter.default", "aten.diagonal.default", "aten.roll.default")
FOR_GPUS = frozenset(NORMS) | frozenset(_MOVED_BY_PATTERN)


def compile_aten_call(bb: relax.BlockBuilder, call: Call, content: dict[str, Any]) -> Expr:
    """Emit loops for a marked ATen call by ``bb``; ``content`` is the parsed spec of the call."""
    tensors = tensors_of(call)
    arguments = Arguments.of(content, tensors)
    if content.get("channels_last"):
        return pool_with_channels_last(bb, call, arguments, tensors[0])
    return COMPILED[content["op"]](bb, call, arguments)


__all__ = ["COMPILED", "FOR_GPUS", "compile_aten_call"]
