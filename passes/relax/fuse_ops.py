"""TVM's FuseOps, kept from groups that it would put together wrongly.

FuseOps of TVM 0.27 makes a group's parameters of the fields that the group reads of a tuple. Where
it reads several tuples it may replace the wrong parameter, by the order of a hash table, and leaves
an ill-formed function. So no group may read several tuples: their fields are bound outside of it.

Before::

    with R.dataflow():
        a = R.call_pure_packed("first", x)
        b = R.call_pure_packed("second", x)
        a0 = a[0]
        a1 = a[1]
        b0 = b[0]
        ...  # add(add(a0, a1), b0) becomes one function

After::

    with R.dataflow():
        a = R.call_pure_packed("first", x)
        b = R.call_pure_packed("second", x)
        a0 = a[0]
        a1 = a[1]
        b0 = b[0]
        out = fused_add_add(a0, a1, b0)

Requires: operators are legalised and their functions say how they fuse.
Guarantees: what FuseOps fuses, but for groups through the fields of tuples, and in groups of at
most 64 operators: a chain of 1,000 equal layers becomes calls of few functions.
Runs after: AnnotateTIROpPattern. Runs before: FuseTIR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tvmbridge.legalize.broadcast import OPAQUE
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions

# The time to schedule and to compile a function grows by more than the square of its operators:
# 250 layer norms in one function take 42 s. A training step of ResNet-18 has the groups that it has
# without a bound; with 32 it has two more.
_MOST_OPERATORS = 64
_MAX_DEPTH = "relax.FuseOps.max_depth"


@dataclass(frozen=True)
class FuseOps(RelaxPass):
    """Fuse operators; fields of tuples that a group would mix up stay outside of all groups.

    First the fields of tuples that nothing is fused with anyway, then, if need be, of all.
    """

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        fused = _fused(mod)
        choices: tuple[Callable[[relax.Expr], bool], ...] = (
            lambda value: _is_opaque(value, mod),
            lambda value: True,
        )
        for chosen in choices:
            mixed = _mixed(fused)
            if not mixed:
                break
            report.rewrote(mixed)
            fused = _fused(_with_fields_outside(mod, chosen))
        return fused


def _fused(mod: tvm.IRModule) -> tvm.IRModule:
    config = {**tvm.transform.PassContext.current().config, _MAX_DEPTH: _MOST_OPERATORS}
    with tvm.transform.PassContext(config=config):
        return relax.transform.FuseOps()(mod)


def _bound(function: relax.Function) -> dict[relax.Var, relax.Expr]:
    return {b.var: b.value for block in function.body.blocks for b in block.bindings}


def _is_opaque(value: relax.Expr, mod: tvm.IRModule) -> bool:
    """Whether FuseOps fuses nothing with ``value``."""
    if isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.call_tir":
        attrs = mod[value.args[0]].attrs
        return int(attrs.get("op_pattern", OPAQUE)) == OPAQUE
    return True


def _mixed(mod: tvm.IRModule) -> int:
    """How many calls of fused functions take more than two fields, of more than one tuple.

    What was mixed up takes as many arguments that are tuples or their fields.
    """
    count = 0
    for _, function in mod.functions_items():
        if not isinstance(function, relax.Function) or _is_fused(function):
            continue
        bound = _bound(function)
        for value in bound.values():
            if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
                continue
            tuples = [t for t in (_tuple_of(arg, bound) for arg in value.args) if t is not None]
            count += len(tuples) > 2 and len(set(tuples)) > 1
    return count


def _is_fused(function: relax.Function) -> bool:
    return "Primitive" in function.attrs


def _tuple_of(arg: relax.Expr, bound: dict[relax.Var, relax.Expr]) -> relax.Var | None:
    """The variable that ``arg`` is a field of, or that it is, if that is a tuple."""
    value = bound.get(arg)
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value
    return arg if isinstance(arg.ty, relax.TupleType) else None


def _with_fields_outside(mod: tvm.IRModule, chosen: Callable[[relax.Expr], bool]) -> tvm.IRModule:
    """``mod`` with fields of the chosen tuples bound to variables that leave the dataflow block.

    FuseOps takes such a variable into no group of those that read it.
    """

    def rewrite(function: relax.Function) -> relax.Function:
        if _is_fused(function):
            return function
        bound = _bound(function)
        outside = {
            var: relax.Var(var.name, var.ty)
            for var, value in bound.items()
            if isinstance(var, relax.DataflowVar)
            and isinstance(value, relax.TupleGetItem)
            and chosen(bound.get(value.tuple_value))
        }

        def rename(var: relax.DataflowVar, _: Any) -> relax.Var:
            return outside.get(var, var)

        return tvm_ffi.structural_mutate(function, (relax.DataflowVar, rename))

    return map_functions(mod, rewrite)
