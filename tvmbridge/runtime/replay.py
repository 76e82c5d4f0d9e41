"""Run the module's own forward again as it ran at an earlier call, without effects on the module.

Forward may write buffers, rebind them and leave values in attributes. The replay then runs on a
stand-in of the module, with the tensors that the call read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.calls.standins import stand_in, tensors_replaced
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.types import OutputKind
from tvmbridge.graph_capture.trace.left import LeftWatch
from tvmbridge.runtime.guards.forwards import own_forward
from tvmbridge.runtime.guards.state import ModuleState

# Old values are copied at each call, so only small ones are.
_LARGEST_KEPT = 2**20


class Replay:
    """Runs the own forward of a module on the tensors of an earlier call.

    - ``written``: positions of the module's tensors that a call writes or rebinds.
    - ``renewed``: positions of the tensors that are other objects after a call.
    - ``keeps_too_much``: whether a call would have to copy too much memory to be repeated.
    """

    def __init__(self, state: ModuleState, captured: CapturedGraph) -> None:
        self._state = state
        left = captured.convention.left
        self._left = [key for key in left if len(key) == 2]  # others are numbers in containers
        changed = [o for o in captured.outputs if o.kind is OutputKind.BUFFER_MUTATION]
        names = {name: i for i, name in enumerate(state.names)}
        self.written = frozenset(names[o.target] for o in changed if o.target in names)
        held = {names[name] for name in captured.convention.held if name in names}
        attributes = {".".join(filter(None, key)) for key in self._left}
        self._numbers = frozenset(held)
        self.renewed = self.written | held | {i for n, i in names.items() if n in attributes}
        read = captured.read_by_results()
        specs = {d.target: d.spec for d in captured.inputs if d.name in read}
        self._kept = [i for n, i in names.items() if i in self.written and n in specs]
        sizes = [specs[state.names[i]] for i in self._kept]
        self.keeps_too_much = sum(s.nbytes for s in sizes) > _LARGEST_KEPT
        self._is_plain = not (changed or left or held)

    def keep(self, tensors: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return copies of those of the module's ``tensors`` that a call reads and then writes."""
        return {i: tensors[i].detach().clone() for i in self._kept}

    def can_replace(self, tensors: Sequence[Any]) -> bool:
        """Whether a stand-in of the module can hold ``tensors``, the module's tensors at a call.

        A script may have exchanged the tensors since, as ``torch.func.functional_call`` does for
        one call. No tensor may be missing now, and none may stand for two tensors of the call.
        """
        found: dict[int, Any] = {}
        return all(
            now is not None and found.setdefault(id(now), then) is then
            for i, (now, then) in enumerate(zip(self._state.tensors(), tensors, strict=True))
            if i not in self.renewed
        )

    @contextmanager
    def forward(
        self, tensors: Sequence[Any], kept: Mapping[int, torch.Tensor]
    ) -> Iterator[Callable[..., Any]]:
        """Yield the module's own forward, which computes what it computed at the call.

        It returns ``(results, left)`` if forward leaves values in attributes.

        Args:
            kept: the copies that :meth:`keep` returned before the call.
        """
        module = self._state.module
        present = self._state.tensors()
        if self._is_plain and all(map(operator.is_, present, tensors)):
            yield own_forward(module)
            return
        actor = stand_in(module) or module
        held = {}
        for i, (now, then) in enumerate(zip(present, tensors, strict=True)):
            value = kept.get(i, then)
            if i in self.written and i not in kept:  # the results do not depend on its value
                value = then.detach().clone()
            if now is not value and i not in self._numbers:
                held[id(now)] = value
        with tensors_replaced(actor, held):
            self._state.set_numbers(actor, {i: tensors[i] for i in self._numbers})
            forward = own_forward(actor)
            yield LeftWatch(forward, actor, self._left) if self._left else forward
