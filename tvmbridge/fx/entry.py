"""An entry: the graph that passes have made of a module in one mode, and when it may run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import PassRecord
from tvmbridge.fx.sizes import Sizes
from tvmbridge.fx.tracing import Traced
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.state import ModuleState


class Binding:
    """Where the inputs of a traced graph come from: the module's tensors, and leaves of a call."""

    def __init__(self, traced: Traced, state: ModuleState) -> None:
        captured = traced.captured
        self.names = state.names
        of_module = {
            d.name: i for i, d in enumerate(d for d in captured.inputs if d.kind.is_of_module)
        }
        position = -1
        self.sources: list[tuple[str, Any]] = []
        for spec in captured.program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind.name == "USER_INPUT":
                position += 1
                self.sources.append(("leaf", position))
            elif name in of_module:
                self.sources.append(("module", of_module[name]))
            else:
                self.sources.append(("constant", captured.constant_tensors[name]))
        own = [i for kind, i in self.sources if kind == "module"]
        # The usual order: the module's tensors, then the leaves.
        kinds = [kind for kind, _ in self.sources]
        count = len(own)
        plain = kinds == ["module"] * count + ["leaf"] * (len(kinds) - count)
        self._plain = plain and own == list(range(len(state.names)))

    def __call__(self, tensors: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """The inputs of the graph."""
        if self._plain:
            return (*tensors, *leaves)
        return [
            tensors[i] if kind == "module" else leaves[i] if kind == "leaf" else i
            for kind, i in self.sources
        ]


@dataclass
class Entry:
    """A graph, its binding, and what must be as it was when it was traced.

    ``original`` is the graph before the passes, ``records`` what these did.
    """

    module: nn.Module
    graph_module: fx.GraphModule
    original: fx.GraphModule
    out_spec: pytree.TreeSpec
    signature: Signature
    sizes: Sizes
    state: ModuleState
    binding: Binding
    records: tuple[PassRecord, ...] = ()
    calls: int = 0
    _fast: tuple[Any, list[torch.Tensor]] | None = field(default=None, repr=False)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call's arguments; None where they are structured otherwise."""
        return self.signature.flatten(args, kwargs)

    def tensors(self) -> list[torch.Tensor] | str:
        """The module's tensors of now, or why the graph does not fit the module any more."""
        fast = self._fast
        if fast is not None and fast[0].check((), {}) is not None:
            return fast[1]
        self._fast = None
        found = self.state.tensors()
        reason = self.state.changed(found, check_grad=False)
        if reason is not None:
            return reason
        tensors = [t for t in found if t is not None]
        if self.state.is_plain:
            guard = FastGuard(self.state, _NOTHING, [], tensors, [], False)
            self._fast = guard, tensors
        return tensors

    def run(self, tensors: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """What forward returns."""
        self.calls += 1
        results = self.graph_module.forward(*self.binding(tensors, leaves))
        return pytree.tree_unflatten(list(results), self.out_spec)


_NOTHING = Signature((), {})
