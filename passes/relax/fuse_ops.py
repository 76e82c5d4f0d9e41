"""TVM's FuseOps, without groups that it would fuse into ill-formed functions.

FuseOps of TVM 0.27 replaces a tuple that a group reads by parameters for the fields that are read.
If a group reads several tuples, FuseOps may replace the wrong parameter, depending on the order of
a hash table, and leaves an ill-formed function. So no group may read several tuples: this pass
binds their fields outside of the group.

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

Requires: operators are legalized, and their functions have the attribute ``op_pattern``.
Guarantees: the same groups as FuseOps, except that no group reads fields of several tuples or has
more than ``most`` operators: a chain of 1,000 equal layers becomes calls of few functions.
Runs after: AnnotateTIROpPattern. Runs before: FuseTIR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tvmbridge.legalize.broadcast import OPAQUE
from tvmbridge.passes.base import PassReport, RelaxPass, bindings_of, map_functions

# The time to schedule and to compile a function grows by more than the square of its operators:
# 250 layer norms in one function take 42 s. A training step of ResNet-18 has the groups that it has
# without a bound; with 32 it has two more.
MOST_ON_GPUS = 128
"""The largest group on GPUs, where norms are no loops: backward of GELU in bfloat16 has 70."""
_MAX_DEPTH = "relax.FuseOps.max_depth"


@dataclass(frozen=True)
class FuseOps(RelaxPass):
    """Fuse operators, and keep the fields of tuples that FuseOps would mix up out of all groups.

    The first attempt does so only for tuples of operators that FuseOps does not fuse anyway, the
    second one for all tuples. ``most`` is the largest number of operators of a group.
    """

    most: int = 64

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        fused = _fused(mod, self.most)
        choices: tuple[Callable[[relax.Expr], bool], ...] = (
            lambda value: _is_opaque(value, mod),
            lambda value: True,
        )
        for chosen in choices:
            mixed = _mixed(fused)
            if not mixed:
                break
            report.rewrote(mixed)
            fused = _fused(_with_fields_outside(mod, chosen), self.most)
        return fused


def _fused(mod: tvm.IRModule, most: int) -> tvm.IRModule:
    """Return the result of TVM's pass, which gets the returned fields as outputs of their block.

    FuseOps fuses nothing with a returned tuple, but for each of its fields it counts all operators
    up to it: the time of 1,000 layers whose results are returned grows with the square.
    """
    config = {**tvm.transform.PassContext.current().config, _MAX_DEPTH: most}
    functions = {n.name_hint: f for n, f in mod.functions_items() if isinstance(f, relax.Function)}
    fields = {name: found for name, f in functions.items() if (found := _fields_within(f))}
    with tvm.transform.PassContext(config=config):
        fused = relax.transform.FuseOps()(_with_renamed(mod, fields, relax.Var))
    return _with_renamed(fused, fields, relax.DataflowVar)


def _with_renamed(
    mod: tvm.IRModule, fields: Mapping[str, Mapping[int, str]], kind: type[relax.Var]
) -> tvm.IRModule:
    """Return ``mod`` with variables of class ``kind`` for the returned fields of functions."""
    for name, names in fields.items():
        mod = map_functions(mod, partial(_renamed, names=names, kind=kind), only=name)
    return mod


def _returned(function: relax.Function) -> relax.Tuple | None:
    """Return the tuple that is bound to the result of ``function``, or None."""
    for block in reversed(function.body.blocks):
        for bound in reversed(block.bindings):
            if bound.var.same_as(function.body.body):
                return bound.value if isinstance(bound.value, relax.Tuple) else None
    return None


def _fields_within(function: relax.Function) -> dict[int, str]:
    """Return positions and names of the returned fields that are not outputs of their block."""
    returned = None if _is_fused(function) else _returned(function)
    fields = () if returned is None else returned.fields
    return {i: f.name for i, f in enumerate(fields) if isinstance(f, relax.DataflowVar)}


def _renamed(
    function: relax.Function, names: Mapping[int, str], kind: type[relax.Var]
) -> relax.Function:
    """Return ``function`` with variables of class ``kind`` for the returned fields in ``names``."""
    returned = _returned(function)
    if returned is None:
        return function
    fields = list(returned.fields)
    others = {fields[i]: kind(name, fields[i].ty) for i, name in names.items()}
    before = relax.DataflowVar if kind is relax.Var else relax.Var
    return tvm_ffi.structural_mutate(function, (before, lambda var, _: others.get(var, var)))


def _is_opaque(value: relax.Expr, mod: tvm.IRModule) -> bool:
    """Whether FuseOps fuses no other operator with ``value``."""
    if isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.call_tir":
        attrs = mod[value.args[0]].attrs
        return int(attrs.get("op_pattern", OPAQUE)) == OPAQUE
    return True


def _mixed(mod: tvm.IRModule) -> int:
    """Count the calls of fused functions whose parameters FuseOps may have mixed up.

    Such a call has more than two arguments that are tuples or fields, from more than one tuple.
    """
    count = 0
    for _, function in mod.functions_items():
        if not isinstance(function, relax.Function) or _is_fused(function):
            continue
        bound = bindings_of(function)
        for value in bound.values():
            if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
                continue
            tuples = [t for t in (_tuple_of(arg, bound) for arg in value.args) if t is not None]
            count += len(tuples) > 2 and len(set(tuples)) > 1
    return count


def _is_fused(function: relax.Function) -> bool:
    return "Primitive" in function.attrs


def _tuple_of(arg: relax.Expr, bound: dict[relax.Var, relax.Expr]) -> relax.Var | None:
    """Return the tuple that ``arg`` is, or is a field of; None if it is neither."""
    value = bound.get(arg)
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value
    return arg if isinstance(arg.ty, relax.TupleType) else None


def _with_fields_outside(mod: tvm.IRModule, chosen: Callable[[relax.Expr], bool]) -> tvm.IRModule:
    """Return ``mod`` with fields of the chosen tuples bound to outputs of the dataflow block.

    FuseOps does not fuse such a variable with its readers.
    """

    def rewrite(function: relax.Function) -> relax.Function:
        if _is_fused(function):
            return function
        bound = bindings_of(function)
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
