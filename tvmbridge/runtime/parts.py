"""Parts: a module that cannot be captured as one graph runs as several, with PyTorch between."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tvmbridge.calls.awaited import awaited, is_pending
from tvmbridge.calls.plain import unusual
from tvmbridge.core.errors import DataDependentError
from tvmbridge.core.locks import Lock
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.sharding import is_distributed
from tvmbridge.core.torch_private import has_any_global_hook, pytree

ON_BREAK = ("eager", "forward")
NO_PART = Reason(Kind.NO_PART)

# Smaller parts are not compiled: a call of compiled code costs as much as a few operators.
_FEWEST_OPERATORS = 3
# The function that reads a number from a tensor, which no part would compile.
_READS = "item"
# After this many calls in which no part was compiled code, the module is not cut any more.
_CALLS_WITHOUT_PARTS = 8
# The same, if the module has repeated blocks, which then are the parts.
_CALLS_BEFORE_REGIONS = 2
# After this many calls in a row that have compiled parts, each call has state of its own.
_CALLS_WITH_NEW_PARTS = 8


@dataclass(frozen=True)
class PartReport:
    """One part of a module: a graph between two breaks.

    - ``name``: the module class or the function that the part's code belongs to.
    - ``operators``: the number of its operators.
    - ``calls``: the number of its calls that compiled code served.
    - ``eager_calls``: the number of its calls that eager PyTorch served, by the reason.
    - ``ends``: why and where the graph ends; empty if it ends because forward returns.
    """

    name: str
    operators: int
    calls: int
    eager_calls: Mapping[str, int]
    ends: str = ""


class ServedParts(Protocol):
    """Runs the forward of a module in parts.

    - ``made``: the number of parts that TorchDynamo has captured so far.
    """

    made: int

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Reason | None]:
        """Run ``original``, the forward of the module, in parts.

        Returns:
            The results, and the reason why no compiled code has served the call; None if it has.
        """

    def reports(self) -> tuple[PartReport, ...]:
        """Return a report of each part that calls have reached so far."""

    def breaks(self) -> Mapping[str, int]:
        """Return how often a graph was cut, by the reason (what runs eagerly between parts)."""


class Cut:
    """The decision whether a module is cut into parts, and the parts.

    - ``make``: creates the parts from the code of the module; None: the module is never cut.
    - ``why``: why the module cannot be one graph; None: it is not cut.
    - ``served``: the number of calls in which compiled parts have run.
    - ``parts``: the parts, created at the first call that is served in parts.
    - ``of_regions``: whether the parts are regions, the repeated blocks of the module.
    - ``make_regions``: creates regions in place of parts that are all too small; None: the module
      has no repeated blocks.
    - ``of_hooks``: whether the module is cut because of hooks of submodules, which may be removed.
    """

    def __init__(
        self,
        make: Callable[[Any], ServedParts] | None = None,
        *,
        of_regions: bool = False,
        make_regions: Callable[[Any], ServedParts] | None = None,
    ) -> None:
        self.make = make
        self.of_regions = of_regions
        self.make_regions = make_regions
        self.why: str | None = None
        self.of_hooks = False
        self.served = 0
        self.parts: ServedParts | None = None
        self._without = self._with_new = 0
        self._of_state = self._tried = False
        self._process = os.getpid()
        self._changing = Lock()

    def renewed(self) -> Cut:
        """Return the same decision for a copy of the module, without parts yet."""
        cut = Cut(self.make, of_regions=self.of_regions, make_regions=self.make_regions)
        cut.why, cut._of_state, cut.of_hooks = self.why, self._of_state, self.of_hooks
        return cut

    def begin(self, of: Any) -> None:
        """Create the parts of the module of the code ``of``, unless there are any."""
        with self._changing:
            if self.parts is None:
                assert self.make is not None
                self.parts = self.make(of)

    def at(self, why: str, of_state: bool = False, tried: bool = False) -> bool:
        """Serve calls in parts from now on; return False if the module is never cut.

        Args:
            why: the reason.
            of_state: whether the reason is state that forward changes. A value of it that decides
                the graph would have new parts compiled at each call.
            tried: whether the module is never cut if the first call has no part that is compiled.
        """
        if self.make is None:
            return False
        self.why, self._of_state, self._tried = why, of_state, tried
        self.of_hooks = False
        return True

    def at_hooks(self, why: str) -> bool:
        """Serve calls in parts as long as submodules have hooks; ``why`` and result as for at."""
        self.of_hooks = self.at(why)
        return self.of_hooks

    def end(self) -> None:
        """Serve calls whole again, after the last hook was removed."""
        self.why, self.of_hooks, self._without = None, False, 0

    def instead_of(self, eager: Mapping[str, int]) -> None:
        """Refuse code after which PyTorch runs many ``eager`` functions that parts would compile.

        Raises:
            DataDependentError: the module is to be cut instead.
        """
        count = sum(n for name, n in eager.items() if name != _READS)
        if self.make is not None and count >= _FEWEST_OPERATORS:
            raise DataDependentError(
                f"behind its code PyTorch would run {', '.join(eager)}, whose sizes depend on data"
            )

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reason | None:
        """Return why a call cannot be served in parts; None if it can."""
        if os.getpid() != self._process:
            return Reason(Kind.FORKED)
        if self._without >= _CALLS_WITHOUT_PARTS:
            return self._no_part()
        if self._of_state and self._with_new >= _CALLS_WITH_NEW_PARTS:
            return Reason(Kind.PARTS_ANEW, self.why or "")
        # TorchDynamo does not notice a global hook that is registered after its compilation.
        if has_any_global_hook():  # type: ignore[no-untyped-call]
            return Reason(Kind.ALL_HOOKED)
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = (unusual(t) for t in tensors if not (is_distributed(t) or is_pending(t)))
        reason = next(filter(None, found), None)
        return None if reason is None else Reason(Kind.UNUSUAL, f"an argument {reason}")

    def run(
        self, of: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Reason | None]:
        """Run the module of the code ``of`` in parts, by :meth:`ServedParts.run`, and count it."""
        self.begin(of)
        assert self.parts is not None
        made = self.parts.made
        args, kwargs = awaited((args, kwargs))
        results, reason = self.parts.run(of.original, args, kwargs)
        with self._changing:
            self.served += reason is None
            self._with_new = self._with_new + 1 if self.parts.made != made else 0
            if reason is NO_PART:
                self._without += 1
                reason = self._no_part()
                if self._tried:
                    self.make = self.why = None
                else:
                    self._turn_to_regions(of)
            elif reason is None:
                self._without, self._tried = 0, False
        return results, reason

    def _turn_to_regions(self, of: Any) -> None:
        """Have the repeated blocks of the module be its parts, if no other part is large enough.

        TorchDynamo captures no part of a loop over blocks that breaks the graph, and no block
        whose class is PyTorch's own.
        """
        if self.make_regions is None or self._without < _CALLS_BEFORE_REGIONS or self.of_hooks:
            return
        self.make, self.make_regions = self.make_regions, None
        self.parts, self.of_regions, self._without = self.make(of), True, 0

    def _no_part(self) -> Reason:
        """Return why a module runs eagerly whose parts are all too small to be compiled."""
        return Reason(Kind.NO_PART, self.why or "")
