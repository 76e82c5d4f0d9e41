"""Mistakes in GPU code and in CUDA graphs; the tests that catch them need a GPU."""

from __future__ import annotations

from tests.planted.plant import Plant

_GRAPHS = "tests/gpu/test_graphs.py"
_USE = "tests/gpu/test_graph_use.py"
_VALUES = "tests/gpu/test_values.py"
_ATTENTION = "tests/gpu/test_attention.py"
_BERT = "tests/gpu/test_bert.py"

GPU = (
    Plant(
        "a replay with the inputs of the recorded call",
        "runtime",
        "tvmbridge.runtime.cuda_graphs",
        "            held.copy_(given)",
        "            pass",
        (_GRAPHS, "-k", "inference or training"),
    ),
    Plant(
        "outputs in the memory of a graph",
        "runtime",
        "tvmbridge.runtime.cuda_graphs",
        "return [*_copied(self.results[: self.copies], self._padded), *self._kept()]",
        "return [*self.results[: self.copies], *self._kept()]",
        (_GRAPHS, "-k", "earlier_calls or held_over"),
    ),
    Plant(
        "residuals of a forward whose backward has not run, overwritten",
        "runtime",
        "tvmbridge.runtime.graphed",
        "if lease is not None and lease.active:",
        "if False and lease is not None:",
        (_GRAPHS, "-k", "twice_before or later_calls"),
    ),
    Plant(
        "a replay on another stream",
        "guard",
        "tvmbridge.runtime.cuda_graphs",
        "if self._graph is not None and self._stream != current_raw_stream(self._index):",
        "if self._graph is None and self._stream != 0:",
        (_USE, "-k", "another_stream"),
    ),
    Plant(
        "a backward of attention with another mask",
        "kernels",
        "tvmbridge.graph_capture.trace.fused_attention",
        "    return output.transpose(1, 2).contiguous(), sums, seed.to(device), offset.to(device)",
        "    seed = torch.full_like(seed, 7)\n"
        "    return output.transpose(1, 2).contiguous(), sums, seed.to(device), offset.to(device)",
        (_ATTENTION, "-k", "mask_of_forward"),
    ),
    Plant(
        "layer norm's gradient without the mean of its slope",
        "rules",
        "tvmbridge.legalize.aten.norms",
        "if flat_part is not None:",
        "if flat_part is None and mean is not None:",
        (_VALUES, _BERT, "-k", "embedding or gpt2 or without_dropout"),
    ),
    Plant(
        "a product of few rows without its last lanes",
        "kernels",
        "tvmbridge.schedules.gpu.few_rows",
        "                for k in range(_LANES):\n                    total",
        "                for k in range(_LANES - 1):\n                    total",
        (_BERT, "-k", "without_dropout"),
    ),
    Plant(
        "halves of a warp that are not exchanged",
        "kernels",
        "tvmbridge.schedules.gpu.few_rows",
        "for offset in (16, 8, 4, 2, 1):",
        "for offset in (16, 8, 4, 2, 2):",
        (_BERT, "-k", "without_dropout"),
    ),
)
