"""Rewriting: a module is traced, the passes run, and what comes out is held against the module."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from tvmbridge.core.errors import PassError
from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.entry import Binding, Entry, PassOutcome
from tvmbridge.fx.sizes import Sizes
from tvmbridge.fx.tracing import trace
from tvmbridge.fx.trial import Trial
from tvmbridge.passes.fx.base import is_operator
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
            graph_module, outcomes = run_passes(
                traced.graph_module, self.passes, trial if self.measure else None
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
                outcomes=outcomes,
            )


def run_passes(
    graph_module: fx.GraphModule, passes: Sequence[Any], trial: Trial | None = None
) -> tuple[fx.GraphModule, tuple[PassOutcome, ...]]:
    """Run fx passes in order; with a ``trial`` those that make the sample slower are undone.

    Raises:
        PassError: one failed.
    """
    outcomes = []
    for pass_ in passes:
        report, start = PassReport(), time.perf_counter()
        name = type(pass_).__name__
        try:
            result = pass_.apply(graph_module, report)
        except PassError:
            raise
        except Exception as error:
            raise PassError(f"{name} failed: {type(error).__name__}: {error}") from error
        made = result.graph_module
        if trial is not None and result.modified:
            slower = trial.slower(graph_module, made)
            if slower is not None:
                report.decline("all of it", slower)
                report.rewrites, made = 0, graph_module
        outcomes.append(
            PassOutcome(
                name=name,
                rewrites=report.rewrites,
                declined=tuple(report.declined),
                seconds=time.perf_counter() - start,
                operators_before=_operators(graph_module),
                operators_after=_operators(made),
            )
        )
        graph_module = made
    return graph_module, tuple(outcomes)


def _operators(graph_module: fx.GraphModule) -> int:
    return sum(map(is_operator, graph_module.graph.nodes))
