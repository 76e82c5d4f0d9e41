"""Calls of TIR functions in a dataflow block: what they read and define, and their bindings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import tvm
from tvm import relax

from tvmbridge.passes.base import is_call, with_span


@dataclass(frozen=True)
class TirCall:
    """A call of a TIR function.

    - ``callee``: the function.
    - ``args``: the arguments without the results.
    - ``results``: the variables of the results, in order.
    - ``bindings``: the bindings of the call and its results; empty for a merged kernel.
    """

    callee: tvm.ir.GlobalVar
    args: tuple[relax.Expr, ...]
    results: tuple[relax.Var, ...]
    span: Any
    bindings: tuple[relax.Binding, ...] = ()

    @cached_property
    def reads(self) -> Counter[relax.Var]:
        """How often the call reads each variable; not to be changed."""
        return Counter(arg for arg in self.args if isinstance(arg, relax.Var))


Node: TypeAlias = TirCall | relax.Binding
"""A call of a TIR function with its results, or another binding."""


def nodes_of(block: relax.DataflowBlock, uses: Counter[relax.Var]) -> list[Node]:
    """Return the bindings of a block; a call of a TIR function and its results are one node."""
    fields: dict[relax.Var, list[relax.Binding]] = {}
    for binding in block.bindings:
        if isinstance(binding.value, relax.TupleGetItem):
            fields.setdefault(binding.value.tuple_value, []).append(binding)
    kernels: dict[relax.Var, TirCall] = {}
    nodes: list[Node] = []
    for binding in block.bindings:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in kernels:
            continue
        kernel = _kernel(binding, fields.get(binding.var, []), uses)
        nodes.append(kernel or binding)
        if kernel is not None:
            kernels[binding.var] = kernel
    return nodes


def _kernel(
    binding: relax.Binding, fields: list[relax.Binding], uses: Counter[relax.Var]
) -> TirCall | None:
    """Return the call of a TIR function that ``binding`` binds, or None.

    ``fields`` bind the call's results, if there are several. None if the tuple of the results is
    read as a whole, or a result is bound twice.
    """
    call, type_ = binding.value, binding.var.ty
    if not _is_tir_call(call):
        return None
    results = [binding.var]
    if isinstance(type_, relax.TupleType):
        bound = {field.value.index: field.var for field in fields}
        if not len(bound) == len(fields) == uses[binding.var]:
            return None
        results = [
            bound[number] if number in bound else relax.DataflowVar("unread", field)
            for number, field in enumerate(type_.fields)
        ]
    args = tuple(call.args[1].fields)
    return TirCall(call.args[0], args, tuple(results), call.span, (binding, *fields))


def _is_tir_call(value: relax.Expr) -> bool:
    return (
        is_call(value, "relax.call_tir")
        and len(value.args) == 2
        and isinstance(value.args[1], relax.Tuple)
    )


def reads_of(node: Node) -> Counter[relax.Var]:
    if isinstance(node, TirCall):
        return node.reads
    if _is_tir_call(node.value):
        return Counter(arg for arg in node.value.args[1].fields if isinstance(arg, relax.Var))
    return Counter(relax.analysis.free_vars(node.value))


def defined(node: Node) -> tuple[relax.Var, ...]:
    return node.results if isinstance(node, TirCall) else (node.var,)


def uses_of(function: relax.Function) -> Counter[relax.Var]:
    """Count how often each variable is read; one that leaves its block is read once more."""
    uses: Counter[relax.Var] = Counter(relax.analysis.free_vars(function.body.body))
    for block in function.body.blocks:
        for binding in block.bindings:
            uses.update(reads_of(binding))
            if not isinstance(binding.var, relax.DataflowVar):
                uses[binding.var] += 1
    return uses


def bindings_made(node: Node, builder: relax.BlockBuilder) -> list[relax.Binding]:
    if not isinstance(node, TirCall):
        return [node]
    if node.bindings:
        return list(node.bindings)
    types = [var.ty for var in node.results]
    call = with_span(relax.call_tir(node.callee, list(node.args), types), node.span)
    call = builder.normalize(call)  # infers the type
    if len(types) == 1:
        return [relax.VarBinding(node.results[0], call)]
    whole = relax.DataflowVar("merged", relax.TupleType(types))
    fields = [
        relax.VarBinding(var, builder.normalize(relax.TupleGetItem(whole, place)))
        for place, var in enumerate(node.results)
    ]
    return [relax.VarBinding(whole, call), *fields]
