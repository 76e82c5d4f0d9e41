"""Rewriting: a module is traced, the passes run, and what comes out is held against the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.entry import Binding, Entry
from tvmbridge.fx.sizes import Sizes
from tvmbridge.fx.tracing import trace
from tvmbridge.fx.trial import Trial
from tvmbridge.passes.fx.run import run_fx_passes
from tvmbridge.runtime.guards.forwards import with_own_forward
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.state import ModuleState


@dataclass(frozen=True)
class Rewriting:
    """Makes entries of modules.

    ``measure``: a pass after which the sample takes longer is undone, with the two times as the
    reason.
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
    ) -> Entry:
        """The entry of ``module``, whose own forward is ``own``, for arguments like these.

        Raises:
            CaptureError: it cannot be traced.
            PassError: a pass failed, or computes something else than the module on the sample.
        """
        with with_own_forward(module, own):
            traced = trace(module, args, kwargs, needs_grad)
            state = ModuleState(module, traced.captured)
            leaves = pytree.tree_leaves((args, dict(kwargs)))
            binding = Binding(traced, state)
            tensors = state.tensors()
            trial = Trial(module, binding, tensors, leaves, needs_grad)
            graph_module, records = run_fx_passes(
                traced.graph_module, self.passes, trial.slower if self.measure else None
            )
            trial.compare(graph_module, args, kwargs)
            return Entry(
                module=module,
                graph_module=graph_module,
                original=traced.graph_module,
                out_spec=traced.captured.convention.out_spec,
                signature=Signature(args, kwargs, module.forward),
                sizes=Sizes(leaves, traced.relations),
                state=state,
                binding=binding,
                records=records,
            )
