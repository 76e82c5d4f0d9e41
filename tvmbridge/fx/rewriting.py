"""Rewrite a module: trace it, run the passes, and compare the result with the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.combined import FeaturePositions, combined_in, replaced, shapes_of
from tvmbridge.fx.entry import Binding, GraphEntry
from tvmbridge.fx.sizes import sizes_check
from tvmbridge.fx.tracing import Traced, trace_sample
from tvmbridge.fx.trial import Trial
from tvmbridge.passes.fx.combine_sparse_inputs import DONE, FEATURES, Feature
from tvmbridge.passes.fx.run import abandon, run_fx_passes
from tvmbridge.runtime.guards.forwards import with_own_forward
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.state import ModuleState


@dataclass(frozen=True)
class Rewriting:
    """Creates graph entries of modules.

    - ``passes``: the fx passes, in the order in which they run.
    - ``measure``: whether a pass is undone if the sample takes longer after it. The reason that is
      recorded has both times.
    """

    passes: tuple[Any, ...]
    measure: bool = True

    def __call__(
        self,
        module: nn.Module,
        own: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        needs_grad: bool,
    ) -> GraphEntry:
        """Return the entry of ``module``, whose own forward is ``own``, for calls like this sample.

        Raises:
            CaptureError: the module cannot be traced.
            PassError: a pass failed, or the rewritten graph computes other values than the module
                on the sample.
        """
        with with_own_forward(module, own):
            features = combined_in(args, kwargs)
            apart = replaced(args, kwargs)
            try:
                traced = trace_sample(module, args, kwargs, needs_grad)
            except BridgeError as error:
                abandon(self.passes, error)
                raise
            state = ModuleState(module, traced.captured)
            tensors, leaves = state.tensors(), pytree.tree_leaves(apart)
            original = traced.graph_module
            layout = None if features is None else FeaturePositions.of(args, kwargs, features)
            if layout is not None:
                original.meta[FEATURES] = _features(traced, layout)

            def trial(graph_module: fx.GraphModule) -> Trial:
                combines = graph_module.meta.get(DONE) is not None
                binding = Binding(traced, state, graph_module, layout if combines else None)
                given = pytree.tree_leaves((args, dict(kwargs))) if combines else leaves
                return Trial(module, graph_module, binding, tensors, given, needs_grad)

            def slower(before: fx.GraphModule, after: fx.GraphModule) -> str | None:
                return trial(after).slower(trial(before))

            veto = slower if self.measure else None
            graph_module, records = run_fx_passes(original, self.passes, veto)
            final = trial(graph_module)
            final.compare(*apart)
            combines = final.binding.combines
            call = (args, dict(kwargs)) if combines else apart
            return GraphEntry(
                module=module,
                graph_module=graph_module,
                original=original,
                out_spec=traced.captured.convention.out_spec,
                signature=Signature(*call, module.forward),
                fits=sizes_check(
                    pytree.tree_leaves(call),
                    traced.relations,
                    layout.shapes if layout is not None and combines else shapes_of,
                    traced.degenerate,
                ),
                state=state,
                binding=final.binding,
                records=records,
                combines=combines,
            )


def _features(traced: Traced, layout: FeaturePositions) -> tuple[Feature, ...]:
    """Return the features of a traced call, with the names of their placeholders."""
    specs = traced.program.graph_signature.input_specs
    users = [s.arg.name for s in specs if s.kind.name == "USER_INPUT"]

    def name(number: int, kind: int) -> str:
        return users[layout.leaf(number, kind)]

    return tuple(
        Feature(each, name(i, 0), name(i, 1), name(i, 2) if layout.weighted else None)
        for i, each in enumerate(layout.names)
    )
