"""What may serve calls in place of compiled entries, and checks some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.entry import CompiledEntry


class Checks(Protocol):
    """Serves calls in place of :meth:`CompiledEntry.run`, and checks some of them."""

    unchecked: Counter[str]

    def run(
        self,
        module: nn.Module,
        entry: CompiledEntry,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        """What the call returns."""

    def renewed(self) -> Checks:
        """The same for a copy of the module."""
