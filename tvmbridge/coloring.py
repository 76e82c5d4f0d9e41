"""Coloring: which bindings of the joint function run in forward, and what backward needs of them.

The forward color is everything the outputs depend on; the backward color everything else that the
gradients depend on. A value of the forward color that a backward binding reads is a *residual*.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.differentiate import JointModule
from tvmbridge.passes.base import flat_results

# Their result is a rearrangement or a fill: keeping it would cost memory, repeating it nothing.
_VIEWS = frozenset(
    {
        "relax.reshape",
        "relax.permute_dims",
        "relax.expand_dims",
        "relax.squeeze",
        "relax.broadcast_to",
        "relax.full",
        "relax.ones",
        "relax.zeros",
    }
)
# Repeated where they read nothing but inputs of the function: a mask is kept as its one byte.
_LIGHT = frozenset({"relax.astype", "relax.multiply", "relax.add", "relax.subtract"})


@dataclass(frozen=True)
class Coloring:
    """The colors of a joint function's bindings.

    ``forward`` and ``backward`` list bindings in program order (a repeated binding is in both),
    ``residuals`` the forward values that backward reads, ``reads`` the primals that it reads.
    """

    forward: tuple[relax.Binding, ...]
    backward: tuple[relax.Binding, ...]
    residuals: tuple[relax.Var, ...]
    reads: tuple[relax.Var, ...]


def color(joint: JointModule) -> Coloring:
    """Color ``joint`` by the policy ``save_all``: every forward value backward reads is kept.

    Constants, views and light functions of inputs are repeated in backward rather than kept, and
    inputs are passed to it rather than captured.
    """
    function = joint.mod["joint"]
    bindings = list(function.body.blocks[0].bindings)
    bound = {b.var: b for b in bindings}
    results = flat_results(function)
    outputs, gradients = results[: joint.num_outputs], results[joint.num_outputs :]
    primals = list(function.params[: len(joint.primals)])
    in_forward = _dependencies(outputs, bound)
    in_forward |= _items_of(bindings, in_forward)
    repeatable = _repeatable(bindings, in_forward, set(primals))
    in_backward: set[relax.Var] = set()
    residuals: dict[relax.Var, None] = {}
    pending = [g for g in gradients if isinstance(g, relax.Var)]
    while pending:
        var = pending.pop()
        if var in in_backward or var in residuals or var not in bound:
            continue
        if var in in_forward and var not in repeatable:
            residuals[var] = None
            continue
        in_backward.add(var)
        pending.extend(relax.analysis.free_vars(bound[var].value))
    backward = tuple(b for b in bindings if b.var in in_backward)
    read = {v for b in backward for v in relax.analysis.free_vars(b.value)}
    read |= {g for g in gradients if isinstance(g, relax.Var)}
    return Coloring(
        forward=tuple(b for b in bindings if b.var in in_forward),
        backward=backward,
        residuals=tuple(b.var for b in bindings if b.var in residuals),
        reads=tuple(p for p in primals if p in read),
    )


def _dependencies(roots: list[relax.Expr], bound: dict[relax.Var, relax.Binding]) -> set[relax.Var]:
    """Bound variables that ``roots`` depend on, themselves included."""
    found: set[relax.Var] = set()
    pending = [r for r in roots if isinstance(r, relax.Var)]
    while pending:
        var = pending.pop()
        if var in found or var not in bound:
            continue
        found.add(var)
        pending.extend(relax.analysis.free_vars(bound[var].value))
    return found


def _items_of(bindings: list[relax.Binding], in_forward: set[relax.Var]) -> set[relax.Var]:
    """Items of tuples of the forward color: only tensors cross the border, so these may."""
    return {
        b.var
        for b in bindings
        if isinstance(b.value, relax.TupleGetItem) and b.value.tuple_value in in_forward
    }


def _repeatable(
    bindings: list[relax.Binding], in_forward: set[relax.Var], primals: set[relax.Var]
) -> set[relax.Var]:
    """Forward values that backward repeats instead of keeping."""
    repeatable: set[relax.Var] = set()
    from_inputs: set[relax.Var] = set()
    for binding in bindings:
        if binding.var not in in_forward:
            continue
        value = binding.value
        if isinstance(value, tvm.ir.GenericConst | relax.Tuple):
            repeatable.add(binding.var)
            continue
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
            continue
        reads_inputs = all(
            v in primals or v in from_inputs for v in relax.analysis.free_vars(value)
        )
        if reads_inputs and value.op.name in _LIGHT | _VIEWS:
            from_inputs.add(binding.var)
        if value.op.name in _VIEWS or binding.var in from_inputs:
            repeatable.add(binding.var)
    return repeatable
