"""Rewrite a module: trace it, run the passes, and compare the result with the module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.printing.str import StrPrinter  # type: ignore[import-untyped]
from torch import fx, nn

from tvmbridge.core.errors import BridgeError, CaptureError
from tvmbridge.core.generated import Scope
from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.combined import FeaturePositions, combined_in, replaced, shapes_of
from tvmbridge.fx.entry import Binding, GraphEntry
from tvmbridge.fx.tracing import Traced, trace_sample
from tvmbridge.fx.trial import Trial
from tvmbridge.graph_capture.relations import Relations
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


_FUNCTIONS: dict[str, Any] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "True": True,
    "False": False,
}


def sizes_check(
    leaves: Sequence[Any],
    relations: Relations | None,
    shapes: Callable[[Sequence[Any]], Sequence[Any]],
    degenerate: Collection[int] = (),
) -> Callable[[Sequence[Any]], bool]:
    """Return a function that says whether the sizes of a call's leaves fit a traced graph.

    Args:
        shapes: returns the shapes of the traced arguments, given the leaves of a call.
        degenerate: positions of the traced arguments whose sizes may also be 0 or 1, which symbols
            exclude.

    Raises:
        CaptureError: a relation cannot be evaluated, or the sample does not fulfil it.
    """
    hold = _compiled(relations, degenerate) if relations is not None else lambda _: True
    ranks = [(i, leaf.dim()) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def fits(leaves: Sequence[Any]) -> bool:
        return all(leaves[i].dim() == rank for i, rank in ranks) and hold(shapes(leaves))

    try:
        if fits(leaves):
            return fits
    except Exception as error:
        raise CaptureError(f"a relation between sizes cannot be evaluated: {error}") from error
    raise CaptureError("the sizes of the sample do not fit the traced graph")


def _compiled(relations: Relations, degenerate: Collection[int]) -> Callable[[Sequence[Any]], bool]:
    """Return a function that says whether sizes fit the relations."""
    names: dict[Any, str] = {}
    text = _Text(names)
    lines: list[str] = []
    late: list[tuple[str, Any]] = []
    small: set[Any] = set()
    for leaf, shape in relations.shapes.items():
        for dim, expression in enumerate(shape):
            size = f"shapes[{leaf}][{dim}]"
            if isinstance(expression, sympy.Symbol) and expression not in names:
                names[expression] = f"size{len(names)}"
                if leaf in degenerate:
                    small.add(expression)
                lines.append(f"{names[expression]} = {size}")
            else:
                late.append((size, expression))
    lines += [f"if {size} != {text.doprint(other)}: return False" for size, other in late]
    for symbol, (least, most) in relations.bounds.items():
        if symbol in names:
            least = 0 if symbol in small else least
            lines.append(f"if not {least} <= {names[symbol]} <= {most}: return False")
    for guard in relations.guards:
        if guard.free_symbols <= names.keys():
            lines.append(f"if not ({text.doprint(guard)}): return False")
    lines.append("return True")
    source = "def fits(shapes):\n" + "".join(f"    {line}\n" for line in lines)
    function: Callable[[Sequence[Any]], bool]
    function = Scope(_FUNCTIONS).function("fits", source, "<sizes>")
    return function


class _Text(StrPrinter):
    """Writes expressions of sizes with generated names.

    A symbol's own name may come from a user, so it may be no valid or no unique identifier.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, symbol: Any) -> str:
        return self._names[symbol]
