"""A graph entry: a rewritten graph of a module in one mode, and the checks before it may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import PassRecord
from tvmbridge.fx.combined import FeaturePositions
from tvmbridge.fx.tracing import Traced
from tvmbridge.passes.fx.combine_sparse_inputs import COMBINED
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.state import ModuleState


class Binding:
    """Maps the module's tensors and the leaves of a call to the inputs of a graph.

    Args:
        layout: the positions of the features, if the graph takes them combined; otherwise None.
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
        """Return the inputs of the graph."""
        if self._usual:
            return (*tensors, *leaves)
        held = {"module": tensors, "leaf": leaves}
        return [i if kind == "constant" else held[kind][i] for kind, i in self.sources]


@dataclass
class GraphEntry:
    """A graph with its binding, and the conditions under which it may serve a call.

    - ``original``: the graph before the passes; ``graph_module`` is the graph after them.
    - ``out_spec``: the structure of forward's results.
    - ``signature``: the structure and types of the arguments that the graph serves.
    - ``fits``: whether it serves the sizes of a call's leaves.
    - ``state``: the module's tensors and attributes, which must not have changed since the trace.
    - ``records``: one record for each pass.
    - ``combines``: whether the graph takes the features of a call combined.
    - ``calls``: the number of calls served.
    """

    module: nn.Module
    graph_module: fx.GraphModule
    original: fx.GraphModule
    out_spec: pytree.TreeSpec
    signature: Signature
    fits: Callable[[Sequence[Any]], bool]
    state: ModuleState
    binding: Binding
    records: tuple[PassRecord, ...] = ()
    combines: bool = False
    calls: int = 0
    _fast: tuple[Any, list[torch.Tensor]] | None = field(default=None, repr=False)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | Reason:
        """Return the leaves of a call's arguments, or why the graph does not fit them."""
        leaves = self.signature.flatten(args, kwargs)
        if leaves is None:
            return Reason(Kind.STRUCTURE)
        reason = self.signature.mismatch(leaves, any_size=True)
        return reason or (leaves if self.fits(leaves) else Reason(Kind.SHAPE))

    def tensors(self) -> list[torch.Tensor] | Reason:
        """Return the module's current tensors, or why the graph no longer fits the module."""
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
        """Run the graph and return its results in the structure that forward returns."""
        self.calls += 1
        results = self.graph_module.forward(*self.binding(tensors, leaves))
        return pytree.tree_unflatten(list(results), self.out_spec)


_NOTHING = Signature((), {})
