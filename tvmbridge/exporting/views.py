"""Compute outputs that are views: in an exported function they are results of its own code.

In eager PyTorch an output may be an argument, a view of one, or a view of another output. Compiled
code does not return such an output. Here it is copied, element by element, from its base. An output
that is a weight or a view of one is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import tvm
from tvm import relax, te
from tvm.ir import Expr

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.types import InputKind, OutputDescriptor, OutputKind, PassRecord
from tvmbridge.exporting.left import left_places
from tvmbridge.exporting.windows import flat_place, position
from tvmbridge.frontend.importer import constant
from tvmbridge.legalize.broadcast import INJECTIVE
from tvmbridge.passes.base import flat_results
from tvmbridge.pipeline import run_passes, tidy_passes


def with_views(
    mod: tvm.IRModule,
    captured: CapturedGraph,
    weights: Mapping[str, torch.Tensor],
    records: list[PassRecord],
) -> tvm.IRModule:
    """Return ``mod`` with a forward that returns all tensors among forward's results, in order.

    Args:
        weights: the module's parameters and buffers by name.

    Raises:
        ExportError: an output is a view that the code cannot compute.
    """
    users = _users(captured)
    if not left_places(captured) and all(o.is_computed or o.spec is None for o in users):
        return mod
    return run_passes(_with_views(mod, captured, weights), tidy_passes(), records)


def _users(captured: CapturedGraph) -> list[OutputDescriptor]:
    return [o for o in captured.outputs if o.kind is OutputKind.USER]


def _with_views(
    mod: tvm.IRModule, captured: CapturedGraph, weights: Mapping[str, torch.Tensor]
) -> tvm.IRModule:
    forward, users, dropped = mod["forward"], _users(captured), left_places(captured)
    computed = iter(flat_results(forward))
    flat = [next(computed) if o.is_computed else None for o in users]
    bases = _Bases(captured, {p.name: p for p in forward.params}, flat)
    builder = relax.BlockBuilder(mod)
    bindings = [b for block in forward.body.blocks for b in block.bindings]
    # A view of another output comes after that output.
    aliased = [
        (i, o)
        for i, o in enumerate(users)
        if o.alias is not None and o.spec is not None and i not in dropped
    ]
    for place, output in sorted(aliased, key=lambda pair: pair[1].alias.kind is None):  # type: ignore[union-attr]
        value = _constant(output, weights)
        if value is None:
            value = _view(builder, *bases.of(output), output)
        type_ = value.ty_args[0] if isinstance(value, relax.Call) else value.ty
        var = relax.DataflowVar(f"view_{place}", type_)
        bindings.append(relax.VarBinding(var, value))
        flat[place] = var
    fields = [f for i, f in enumerate(flat) if f is not None and i not in dropped]
    results = relax.Var("results", relax.TupleType([f.ty for f in fields]))
    bindings.append(relax.VarBinding(results, relax.Tuple(fields)))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], results)
    whole = relax.Function(forward.params, body, results.ty, is_pure=True)
    made = {n: f for n, f in builder.get().functions_items() if n.name_hint != "forward"}
    return tvm.IRModule({**made, "forward": whole.with_attr("global_symbol", "forward")})


def _constant(output: OutputDescriptor, weights: Mapping[str, torch.Tensor]) -> Expr | None:
    """Return the values of an output that shares memory with a weight; None for other outputs."""
    alias = output.alias
    if alias is None or alias.kind in (None, InputKind.USER) or alias.key not in weights:
        return None
    weight = weights[str(alias.key)].detach()
    if alias.shape is None:
        return constant(weight)
    first = weight.storage_offset() + alias.offset
    return constant(weight.as_strided(alias.shape, alias.stride, first))


class _Bases:
    """Finds the bases of outputs that are views.

    ``flat`` has the user's outputs, with None for each that is not computed yet.
    """

    def __init__(
        self, captured: CapturedGraph, parameters: Mapping[str, Any], flat: Sequence[Any]
    ) -> None:
        self._users, self._flat = _users(captured), flat
        inputs = [d for d in captured.inputs if d.name in parameters]
        self._of_user = {
            d.position: (parameters[d.name], d.spec.stride)
            for d in inputs
            if d.kind is InputKind.USER
        }

    def of(self, output: OutputDescriptor) -> tuple[Any, tuple[int, ...]]:
        """Return the variable that ``output`` is a view of, and its strides in eager PyTorch."""
        alias = output.alias
        assert alias is not None
        if alias.kind is None:
            found = self._flat[int(alias.key)], self._stride(int(alias.key))
        else:
            key = int(alias.key) if alias.kind is InputKind.USER else None
            found = self._of_user.get(key, (None, ()))
        if found[0] is None:
            raise ExportError(
                f"output {output.name} is a view of a tensor that the code does not read; return a "
                "copy of it (clone())"
            )
        return found

    def _stride(self, place: int) -> tuple[int, ...]:
        spec = self._users[place].spec
        return () if spec is None else spec.stride


def _view(
    builder: relax.BlockBuilder, base: Any, strides: Sequence[int], output: OutputDescriptor
) -> relax.Call:
    alias, spec = output.alias, output.spec
    assert alias is not None
    assert spec is not None

    def compute(x: te.Tensor) -> te.Tensor:
        if alias.shape is None:
            return te.compute(x.shape, lambda *i: x(*i), name="T_copy")

        def element(*i: Expr) -> Expr:
            place = flat_place(i, alias.stride, alias.offset)
            return x(*position(place, [int(n) for n in x.shape], strides))

        return te.compute(list(spec.shape), element, name="T_view")

    attrs = {"op_pattern": INJECTIVE}
    return builder.call_te(compute, base, primfunc_name_hint="view", primfunc_attrs=attrs)
