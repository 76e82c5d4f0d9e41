"""The figures that the demo measures, their bounds, and their output as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

EMBEDDING_BOUND = 1e-5
LOSS_BOUND = 1e-4


@dataclass(frozen=True)
class Figures:
    """The figures of one run of the demo.

    Differences are between TVM and eager PyTorch. Times are medians in ms: ``eager_ms`` and
    ``tvm_ms`` for a call that embeds, ``eager_step_ms`` and ``tvm_step_ms`` for a training step.
    ``fallbacks`` counts calls that ran eager PyTorch instead of TVM.
    """

    embedding_max_abs_diff: float
    loss_max_rel_diff: float
    weights_max_abs_diff: float
    eager_ms: float
    tvm_ms: float
    eager_step_ms: float
    tvm_step_ms: float
    tvm_calls: int
    fallbacks: int

    def failures(self) -> list[str]:
        """Return a sentence for each bound that is exceeded; NaN exceeds every bound."""
        failed = []
        if not self.embedding_max_abs_diff <= EMBEDDING_BOUND:
            failed.append(f"embeddings differ by more than {EMBEDDING_BOUND:g}")
        if not self.loss_max_rel_diff <= LOSS_BOUND:
            failed.append(f"a loss differs by more than {LOSS_BOUND:g} of itself")
        if self.fallbacks:
            failed.append("calls fell back to the module's own forward")
        return failed

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table("", "PyTorch eager", "tvmbridge", "bound", title="MiniLM, side by side")
        for column in table.columns[1:]:
            column.justify = "right"

        def times(what: str, eager: float, tvm: float) -> None:
            table.add_row(what, f"{eager:.1f}", f"{tvm:.1f}  ({eager / tvm:.2f}x)", "")

        def difference(what: str, value: float, bound: str = "") -> None:
            table.add_row(f"max |Δ| of {what}", "", f"{value:.1e}", bound)

        difference("embeddings", self.embedding_max_abs_diff, f"{EMBEDDING_BOUND:.0e}")
        difference("losses, relative", self.loss_max_rel_diff, f"{LOSS_BOUND:.0e}")
        difference("weights after the last step", self.weights_max_abs_diff)
        times("ms per call, embedding", self.eager_ms, self.tvm_ms)
        times("ms per step, fine-tuning", self.eager_step_ms, self.tvm_step_ms)
        table.add_row("calls served by TVM", "", str(self.tvm_calls), "")
        table.add_row("calls that fell back", "", str(self.fallbacks), "0")
        return table
