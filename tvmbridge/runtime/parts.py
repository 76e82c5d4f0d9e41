"""Parts: a module that no one graph has is served by graphs, and by PyTorch between them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tvmbridge.core.errors import DataDependentError
from tvmbridge.core.torch_private import has_any_global_hook, pytree
from tvmbridge.graph_capture.observe.plain import unusual

ON_BREAK = ("eager", "forward")
NO_PART = "no part of it is large enough to be compiled"

# Of a part that is compiled: a call of compiled code costs as much as a few operators do.
_FEWEST_OPERATORS = 3
# After so many calls without a compiled part a module is not cut any more.
_CALLS_WITHOUT_PARTS = 8


@dataclass(frozen=True)
class PartReport:
    """One part of a module: a graph between two breaks.

    name: the class of the module, or the function, whose code the part is.
    operators: how many operators it has.
    calls: its calls that compiled code served.
    eager_calls: its calls that PyTorch served, by the reason.
    ends: why the graph ends, and where; empty where forward returns.
    """

    name: str
    operators: int
    calls: int
    eager_calls: Mapping[str, int]
    ends: str = ""


class ServedParts(Protocol):
    """The forward of a module in parts."""

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str | None]:
        """Run ``original``, the forward of the module, in parts.

        Returns:
            the results, and why compiled code has not served the call (None: it has).
        """

    def reports(self) -> tuple[PartReport, ...]:
        """The parts so far."""

    def breaks(self) -> Mapping[str, int]:
        """What runs in eager PyTorch between the parts: how often a graph was cut, by reason."""


class Cut:
    """Whether the graph of a module is cut, and its parts.

    make: makes the parts of a dispatcher's module; None: it is never cut.
    of: the dispatcher.
    why: why no one graph has the module; None: nothing asks for a cut.
    served: the calls that compiled parts have served.
    """

    def __init__(self, make: Callable[[Any], ServedParts] | None = None, of: Any = None) -> None:
        self.make = make
        self.of = of
        self.why: str | None = None
        self.served = 0
        self.parts: ServedParts | None = None
        self._without = 0
        self._process = os.getpid()
        self._changing = threading.Lock()

    def renewed(self, of: Any) -> Cut:
        """The same for ``of``, the dispatcher of a copy, with parts of its own."""
        cut = Cut(self.make, of)
        cut.why = self.why
        return cut

    def at(self, why: str) -> bool:
        """Have calls served in parts, because of ``why``; False: the graph is never cut."""
        if self.make is None:
            return False
        self.why = why
        return True

    def instead_of(self, eager: Mapping[str, int]) -> None:
        """Refuse code behind which PyTorch runs ``eager``, where parts would compile these.

        Raises:
            DataDependentError: the graph is cut in place of that.
        """
        if self.make is not None and sum(eager.values()) >= _FEWEST_OPERATORS:
            raise DataDependentError(
                f"behind its code PyTorch would run {', '.join(eager)}, whose sizes depend on data"
            )

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why a call is not served in parts; None: it may be."""
        if os.getpid() != self._process:
            return "the process was forked after dispatch"
        if self._without >= _CALLS_WITHOUT_PARTS:
            return f"{NO_PART} ({self.why})"
        # TorchDynamo does not notice one that comes later.
        if has_any_global_hook():  # type: ignore[no-untyped-call]
            return "hooks of all modules are registered"
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        found = (unusual(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        reason = next(filter(None, found), None)
        return None if reason is None else f"an argument {reason}"

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str | None]:
        """As :meth:`ServedParts.run`."""
        with self._changing:
            if self.parts is None:
                assert self.make is not None
                self.parts = self.make(self.of)
        results, reason = self.parts.run(original, args, kwargs)
        with self._changing:
            self.served += reason is None
            if reason == NO_PART:
                self._without += 1
            elif reason is None:
                self._without = 0
        return results, reason
