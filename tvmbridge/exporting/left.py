"""Take the values that forward leaves in attributes out of its results.

A file has no module whose attributes a call could set. The values may be left out if no call
depends on them: forward assigns each such attribute before it reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import tvm
from tvm import relax

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.structure import children
from tvmbridge.core.types import OutputDescriptor, OutputKind
from tvmbridge.passes.base import flat_results


def carried_over(captured: CapturedGraph) -> Iterator[str]:
    """Yield the attributes that forward sets and that the next call reads before it sets them."""
    for place, way in captured.convention.left.items():
        if way.into == "place" and place in captured.assumptions.values and way.count is None:
            yield ".".join(part for part in place if part)


def without_left(captured: CapturedGraph, mod: tvm.IRModule) -> tuple[CapturedGraph, tvm.IRModule]:
    """Return a graph and a module that return forward's results alone.

    Raises:
        ExportError: a result is a view of a value that forward leaves in an attribute.
    """
    convention = captured.convention
    if not convention.left:
        return captured, mod
    results, left = children(convention.out_spec)
    dropped = range(results.num_leaves, results.num_leaves + left.num_leaves)
    users = [o for o in captured.outputs if o.kind is OutputKind.USER]
    kept = [_renumbered(o, dropped) for i, o in enumerate(users) if i not in dropped]
    computed = iter(flat_results(mod["forward"]))
    values = [next(computed) if o.is_computed else None for o in users]
    fields = [v for i, v in enumerate(values) if v is not None and i not in dropped]
    others = [o for o in captured.outputs if o.kind is not OutputKind.USER]
    convention = replace(convention, out_spec=results, left={})
    captured = replace(captured, outputs=[*kept, *others], convention=convention)
    return captured, _returning(mod, fields)


def _renumbered(output: OutputDescriptor, dropped: range) -> OutputDescriptor:
    """Return an output; if it is a view of another output, with the number that this one gets."""
    alias = output.alias
    if alias is None or alias.kind is not None or int(alias.key) < dropped.start:
        return output
    if int(alias.key) in dropped:
        raise ExportError(
            f"output {output.name} is a view of a value that forward leaves in an attribute; "
            "return a copy of it (clone())"
        )
    return replace(output, alias=replace(alias, key=int(alias.key) - len(dropped)))


def _returning(mod: tvm.IRModule, fields: list[relax.Expr]) -> tvm.IRModule:
    """Return ``mod`` with a forward that returns ``fields``."""
    forward = mod["forward"]
    results = relax.Var("results", relax.TupleType([f.ty for f in fields]))
    bindings = [b for block in forward.body.blocks for b in block.bindings]
    bindings.append(relax.VarBinding(results, relax.Tuple(fields)))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], results)
    whole = relax.Function(forward.params, body, results.ty, is_pure=True, attrs=forward.attrs)
    functions = {n: f for n, f in mod.functions_items() if n.name_hint != "forward"}
    return tvm.IRModule({**functions, "forward": whole}, attrs=mod.attrs)
