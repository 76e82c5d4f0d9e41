"""An entry: the graph that passes have made of a module in one mode, and when it may run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import PassRecord
from tvmbridge.fx.combined import FeaturePositions
from tvmbridge.fx.sizes import LeafSizes
from tvmbridge.fx.tracing import Traced
from tvmbridge.passes.fx.combine_sparse_inputs import COMBINED
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.state import ModuleState


class Binding:
    """Where the inputs of a graph come from: the module's tensors, and the leaves of a call.

    ``layout``: of the features that the graph takes combined.
    """

    def __init__(
        self,
        traced: Traced,
        state: ModuleState,
        graph_module: fx.GraphModule,
        layout: FeaturePositions | None = None,
    ) -> None:
        captured = traced.captured
        self.names = state.names
        own = [d.name for d in captured.inputs if d.kind.is_of_module]
        known: dict[str, tuple[str, Any]] = {name: ("module", i) for i, name in enumerate(own)}
        position = -1
        for spec in captured.program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind.name == "USER_INPUT":
                position += 1
                known[name] = ("leaf", position if layout is None else layout.given(position))
            elif name not in known:
                known[name] = ("constant", captured.constant_tensors[name])
        if layout is not None:
            known |= {name: ("leaf", layout.first + i) for i, name in enumerate(COMBINED)}
        self.combines = layout is not None
        inputs = graph_module.graph.find_nodes(op="placeholder")
        self.sources = [known[node.name] for node in inputs]
        count = len(state.names)
        usual = [("module", i) for i in range(count)]
        usual += [("leaf", i) for i in range(len(self.sources) - count)]
        self._usual = self.sources == usual

    def __call__(self, tensors: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """The inputs of the graph."""
        if self._usual:
            return (*tensors, *leaves)
        held = {"module": tensors, "leaf": leaves}
        return [i if kind == "constant" else held[kind][i] for kind, i in self.sources]


@dataclass
class GraphEntry:
    """A graph, its binding, and what must be as it was when it was traced.

    ``original`` is the graph before the passes, ``records`` what these did. ``combines``: it takes
    the features of a call combined.
    """

    module: nn.Module
    graph_module: fx.GraphModule
    original: fx.GraphModule
    out_spec: pytree.TreeSpec
    signature: Signature
    sizes: LeafSizes
    state: ModuleState
    binding: Binding
    records: tuple[PassRecord, ...] = ()
    combines: bool = False
    calls: int = 0
    _fast: tuple[Any, list[torch.Tensor]] | None = field(default=None, repr=False)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | str:
        """The leaves of a call's arguments, or why the graph does not fit them."""
        leaves = self.signature.flatten(args, kwargs)
        if leaves is None:
            return "the arguments are structured otherwise"
        return self.sizes.mismatch(leaves) or leaves

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
