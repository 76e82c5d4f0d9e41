"""A result is computed right after the last of its operands, so that these need not wait for it.

Before::

    def backward(x, y, w, ct):
        lv = R.multiply(ct, y)                             # stays in memory up to lv2
        lv1 = R.matmul(lv, w)
        gv1 = R.matmul(lv1, w)                             # a result
        lv2 = R.matmul(R.permute_dims(x), lv)
        gv2 = R.astype(lv2, "float32")                     # a result

After::

    def backward(x, y, w, ct):
        lv = R.multiply(ct, y)
        lv2 = R.matmul(R.permute_dims(x), lv)
        gv2 = R.astype(lv2, "float32")
        lv1 = R.matmul(lv, w)
        gv1 = R.matmul(lv1, w)

A joint function may have the gradients of weights behind those of all inputs. The cotangents of all
layers would then be in memory at the same time.

A value moves with the only value that reads it. A result that is much larger than its operands
stays where it is.

Requires: one dataflow block. Guarantees: the same values.
Runs after: the passes that fuse and merge, which decide what is written to memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    flat_results,
    map_functions,
    readers_of,
    value_bytes,
    with_bindings,
)

# A cast of a gradient from half precision doubles its bytes.
_GROWTH = 2


@dataclass(frozen=True)
class ResultsEarly(RelaxPass):
    """Compute the results of ``backward`` as soon as their operands are there."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def reorder(function: relax.Function) -> relax.Function:
            (block,) = function.body.blocks
            places = _places(function)
            # The sort is stable, so that a value stays behind an operand that has its place.
            ordered = sorted(block.bindings, key=lambda binding: places[binding.var])
            if ordered == list(block.bindings):
                return function
            report.rewrote()
            return with_bindings(function, ordered)

        return map_functions(mod, reorder, "backward")


def _places(function: relax.Function) -> dict[relax.Var, int]:
    """Return the place of each value: its number, or that of an operand or of its reader."""
    bound, readers = bindings_of(function), readers_of(function)
    operands = {
        var: [v for v in relax.analysis.free_vars(value) if v in bound]
        for var, value in bound.items()
    }
    results = set(flat_results(function))
    moving = _leading_to_results(results, readers, bound)
    places: dict[relax.Var, int] = {}
    # Values of arguments alone, which could be computed at any time before their reader.
    free: list[relax.Var] = []
    for number, (var, read) in enumerate(operands.items()):
        waited_for = [places[v] for v in read if v in places]
        if var not in moving or _is_much_larger(var, read):
            places[var] = number
        elif waited_for:
            places[var] = max(waited_for)
        elif var in results:
            places[var] = number
        else:
            free.append(var)
    for var in reversed(free):
        places[var] = min(places[reader] for reader in readers[var] if reader is not None)
    return places


def _is_much_larger(var: relax.Var, read: list[relax.Var]) -> bool:
    return bool(read) and value_bytes(var) > _GROWTH * sum(map(value_bytes, read))


def _leading_to_results(
    results: set[relax.Expr],
    readers: Mapping[relax.Var, list[relax.Var | None]],
    bound: Mapping[relax.Var, relax.Expr],
) -> set[relax.Expr]:
    """Return the results, their items, and the values that only one of these reads."""
    moving = set(results)
    for var in reversed(list(bound)):
        read_by = readers[var]
        if not isinstance(var.ty, relax.TupleType):
            if len(read_by) == 1 and read_by[0] in moving:
                moving.add(var)
        elif read_by and all(reader in moving for reader in read_by):
            moving.add(var)  # a kernel of several results
    return moving
