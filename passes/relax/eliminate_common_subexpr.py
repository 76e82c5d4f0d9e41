"""Replace each repeated expression by the variable of its first occurrence.

TVM's pass of this name does this for one size. Code for any size is compiled at several sizes. Two
expressions may be equal at one of them alone: in a batch of 3 rows, the range of the rows equals
the range of 3 classes. This pass merges expressions only if they are equal at the first size too.

Before::

    with R.dataflow():
        a = R.exp(x)
        b = R.exp(x)
        y = R.add(a, b)
        R.output(y)

After::

    with R.dataflow():
        a = R.exp(x)
        b = a
        y = R.add(a, a)
        R.output(y)

Requires: nothing.
Guarantees: results stay as they are.
Runs after: CanonicalizeBindings. Runs before: CanonicalizeBindings, which removes ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import tvm
from tvm import relax

from tvmbridge.core.decisions import Rule, decided, sizes_vary
from tvmbridge.core.errors import BuildError
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions, with_body

# By the name of a function, and the number of a binding: the number of its first occurrence.
_Merges: TypeAlias = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class EliminateCommonSubexpr(RelaxPass):
    """Merge equal expressions; with varying sizes, those that are equal at the first sizes."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        merged = relax.transform.EliminateCommonSubexpr()(mod)
        if not sizes_vary():
            return merged
        here = _merges(mod, merged)
        chosen = decided(Rule.MIDDLE, lambda: here)
        if chosen == here:
            return merged
        for name, pairs in chosen.items():
            equal = here.get(name, {})
            if any(equal.get(i) != equal.get(j, j) for i, j in pairs.items()):
                raise BuildError("at other sizes, equal expressions differ")
        names = {function: var.name_hint for var, function in mod.functions_items()}
        return map_functions(mod, lambda f: _with_merges(f, chosen.get(names[f], {})))


def _bindings(function: relax.Function) -> list[relax.Binding]:
    body = function.body
    blocks = body.blocks if isinstance(body, relax.SeqExpr) else ()
    return [binding for block in blocks for binding in block.bindings]


def _merges(mod: tvm.IRModule, merged: tvm.IRModule) -> _Merges:
    """Return which bindings of ``mod`` are merged with which earlier ones in ``merged``."""
    found: dict[str, dict[int, int]] = {}
    for var, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        before, after = _bindings(function), _bindings(merged[var.name_hint])
        numbers = {binding.var: i for i, binding in enumerate(after)}
        pairs = {
            i: numbers[new.value]
            for i, (old, new) in enumerate(zip(before, after, strict=True))
            if _is_merged(old, new) and new.value in numbers
        }
        if pairs:
            found[var.name_hint] = pairs
    return found


def _is_merged(old: relax.Binding, new: relax.Binding) -> bool:
    both = isinstance(old, relax.VarBinding) and isinstance(new, relax.VarBinding)
    return both and isinstance(new.value, relax.Var) and not isinstance(old.value, relax.Var)


def _with_merges(function: relax.Function, pairs: Mapping[int, int]) -> relax.Function:
    """Return ``function`` with the variables of first occurrences in place of their repetitions."""
    if not pairs:
        return function
    bindings = _bindings(function)
    blocks, number = [], 0
    for block in function.body.blocks:
        made = []
        for binding in block.bindings:
            if number in pairs:
                first = bindings[pairs[number]].var
                binding = relax.VarBinding(binding.var, first, binding.span)
            made.append(binding)
            number += 1
        blocks.append(type(block)(made, block.span))
    body = relax.SeqExpr(blocks, function.body.body, function.body.span)
    return relax.BlockBuilder().normalize(with_body(function, body))
