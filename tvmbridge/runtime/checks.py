"""The interface of checked execution, which compares some calls with the module's own forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.runtime.entry import CompiledEntry


class Checks(Protocol):
    """Serves calls in place of :meth:`CompiledEntry.run`, and checks some of them.

    - ``unchecked``: the number of calls that could not be checked, by the reason.
    """

    unchecked: Counter[str]

    def run(
        self,
        module: nn.Module,
        entry: CompiledEntry,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        """Serve one call by ``entry``, checked or not, and return its results.

        Args:
            module: the dispatched module.
            entry: the compiled entry for the call.
            leaves: the leaves of the call's arguments.
            tensors: the module's tensors.
            arguments: the positional and keyword arguments.
        """

    def renewed(self) -> Checks:
        """Return an object with the same settings for a copy of the module."""
