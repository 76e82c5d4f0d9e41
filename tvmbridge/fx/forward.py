"""The forward that runs rewritten graphs, and falls back to the module's own forward."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.turns import compiling
from tvmbridge.fx.combined import replaced
from tvmbridge.fx.entry import GraphEntry
from tvmbridge.fx.rewriting import Rewriting
from tvmbridge.graph_capture.surroundings import refused_now
from tvmbridge.graph_capture.trace.standins import STAND_IN
from tvmbridge.runtime.guards.forwards import (
    StandsForForward,
    calling_module,
    forward_of_class,
    pickled_forward,
    rebound,
)
from tvmbridge.runtime.guards.mode import Mode

logger = logging.getLogger(__name__)

# The most graphs of one mode; each is for arguments of other types or sizes.
_MOST_GRAPHS = 4


class FxForward(StandsForForward):
    """The callable that ``optimize_fx`` installs as a module's ``forward``.

    Args:
        module: the module that has this forward.
        own: the forward that the instance had; None if it uses the forward of its class.
        rewriting: creates the graph entries.
    """

    def __init__(self, module: nn.Module, own: Any, rewriting: Rewriting) -> None:
        self.module = module
        self.own = own
        self.rewriting = rewriting
        self.entries: dict[Mode, tuple[GraphEntry, ...]] = {}
        self.refused: dict[Mode, tuple[Reason, ...]] = {}
        self.fallbacks: Counter[str] = Counter()
        functools.update_wrapper(self, self.original)

    @property
    def original(self) -> Any:
        """Return the forward that runs without the passes."""
        return self.own or forward_of_class(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = calling_module(sys._getframe(1))
        if caller is not None and caller is not self.module:
            own = self.own or forward_of_class(caller)
            return self._noted(Reason(Kind.COPY), own, args, kwargs)
        reason = refused_now()
        if reason is not None:
            return self._noted(reason, self.original, args, kwargs)
        mode = Mode.of_now(self.module.training, torch.is_grad_enabled())
        found = self._entry(mode, args, kwargs)
        if isinstance(found, Reason):
            return self._noted(found, self.original, args, kwargs)
        entry, leaves, tensors = found
        return entry.run(tensors, leaves)

    def _noted(self, reason: Reason, forward: Any, args: Any, kwargs: Any) -> Any:
        if reason.text not in self.fallbacks:
            name = type(self.module).__name__
            logger.warning("%s runs its own forward: %s", name, reason)
        self.fallbacks[reason.text] += 1
        apart, named = replaced(args, kwargs)
        return forward(*apart, **named)

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

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self
        own = None if self.own is None else rebound(self.own, self.module, module, memo)
        if STAND_IN in memo:
            return own or forward_of_class(module)
        return FxForward(module, own, self.rewriting)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled_forward(self.module, self.own)
