"""Serve calls by rewritten graphs: the executor of modules that ``optimize_fx`` has rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.turns import compiling
from tvmbridge.fx.combined import replaced
from tvmbridge.fx.entry import GraphEntry
from tvmbridge.fx.rewriting import Rewriting
from tvmbridge.runtime.executor import Executor, Served
from tvmbridge.runtime.fallbacks import Tally
from tvmbridge.runtime.guards.mode import Mode

# The most graphs of one mode; each is for arguments of other types or sizes.
_MOST_GRAPHS = 4


class _GraphTally(Tally):
    by, code, report = "graphs", "a rewritten graph", "fx_report"


class GraphCode(Executor):
    """Serves calls by rewritten graphs in eager PyTorch.

    - ``entries``: the graphs of each mode.
    - ``refused``: why a mode has no further graphs.

    Args:
        own: the forward that the instance had; None if it uses the forward of its class.
    """

    removal = "remove_fx"

    def __init__(
        self, module: nn.Module, own: Callable[..., Any] | None, rewriting: Rewriting
    ) -> None:
        super().__init__(module, own, _GraphTally(type(module).__name__))
        self.rewriting = rewriting
        self.entries: dict[Mode, tuple[GraphEntry, ...]] = {}
        self.refused: dict[Mode, tuple[Reason, ...]] = {}

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Served | Reason:
        """Serve a call by a graph, which is traced now if there is room for one more."""
        mode = Mode.of_now(self.module.training, torch.is_grad_enabled())
        found = self._entry(mode, args, kwargs)
        if isinstance(found, Reason):
            return found
        entry, leaves, tensors = found
        return Served(entry.run(tensors, leaves))

    def own_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments with separate features in place of combined ones."""
        return replaced(args, kwargs)

    def served(self) -> int:
        """Return the number of calls that graphs have served."""
        return sum(entry.calls for entries in self.entries.values() for entry in entries)

    def renewed(
        self, module: nn.Module, own: Callable[..., Any] | None, memo: Mapping[int, Any]
    ) -> GraphCode:
        """Return an executor for ``module``, a deep copy, which traces graphs of its own."""
        return GraphCode(module, own, self.rewriting)

    def _entry(
        self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[GraphEntry, Sequence[Any], Sequence[Any]] | Reason:
        """Return the entry that serves a call, its leaves and its tensors, or why none serves."""
        reason: Reason | None = None
        calls = {True: (args, kwargs)}
        for entry in self.entries.get(mode, ()):
            if entry.combines not in calls:
                calls[False] = replaced(args, kwargs)
            leaves = entry.leaves(*calls[entry.combines])
            if isinstance(leaves, Reason):
                reason = reason or leaves
                continue
            tensors = entry.tensors()
            if isinstance(tensors, Reason):
                reason = tensors
                continue
            return entry, leaves, tensors
        refused = self.refused.get(mode, ())
        if len(self.entries.get(mode, ())) + len(refused) >= _MOST_GRAPHS:
            return reason or refused[-1]
        return self._make(mode, args, kwargs) or self._entry(mode, args, kwargs)

    def _make(self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reason | None:
        """Trace an entry for calls like this one; return the reason if that is refused."""
        with compiling():
            try:
                entry = self.rewriting(self.module, self.own, args, kwargs, mode.needs_grad)
            except BridgeError as error:
                reason = Reason(Kind.FAILED, str(error))
                self.refused[mode] = (*self.refused.get(mode, ()), reason)
                return reason
        self.entries[mode] = (entry, *self.entries.get(mode, ()))
        return None

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Trace an entry for a sample.

        Raises:
            BridgeError: the sample is refused.
        """
        mode = Mode.of_now(self.module.training, torch.is_grad_enabled())
        self.refused.pop(mode, None)
        entry = self.rewriting(self.module, self.own, args, kwargs, mode.needs_grad)
        self.entries[mode] = (entry, *self.entries.get(mode, ()))
