"""Remove bindings that nothing reads, and functions that nothing calls.

The time of TVM's pass of this name grows with the square of the number of dead bindings: for four
thousand of them it takes four seconds.

Before::

    with R.dataflow():
        both = R.split(x, 2)
        left = both[0]
        right = both[1]
        y = R.exp(left)
        R.output(y)

After::

    with R.dataflow():
        both = R.split(x, 2)
        left = both[0]
        y = R.exp(left)
        R.output(y)

Requires: nothing.
Guarantees: every variable bound in a dataflow block is read; results stay as they are.
Runs after: all passes that leave unread bindings. Runs before: FoldConstant, which removes dead
bindings itself, in quadratic time as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, map_functions, with_body


@dataclass(frozen=True)
class DeadCodeElimination(RelaxPass):
    """Remove unread bindings and uncalled functions.

    Args:
        entries: names of functions that stay although nothing calls them; public functions always
            stay.
    """

    entries: tuple[str, ...] = ()

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        live = map_functions(mod, lambda function: _live(function, report, _is_pure))
        # TVM's pass removes the rest: functions, and bindings outside of dataflow blocks.
        cleaned = relax.transform.DeadCodeElimination(list(self.entries))(
            live if report.rewrites else mod
        )
        return mod if cleaned.same_as(mod) else cleaned


@dataclass(frozen=True)
class DropUnreadTuples(RelaxPass):
    """Remove tuples of values that nothing reads, from functions in destination-passing style.

    CallTIRRewrite makes a tuple of the results of a kernel that has several. KillAfterLastUse frees
    the results, but not the tuple, which would keep their memory up to the end of the function.

    Runs after: KillAfterLastUse. Runs before: LowerRuntimeBuiltin.
    """

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda function: _live(function, report, _is_tuple))


def _is_pure(binding: relax.Binding) -> bool:
    # A MatchCast checks a shape, whether or not its variable is read.
    return isinstance(binding.var, relax.DataflowVar) and isinstance(binding, relax.VarBinding)


def _is_tuple(binding: relax.Binding) -> bool:
    return isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.Tuple)


def _live(
    function: relax.Function, report: PassReport, removable: Callable[[relax.Binding], bool]
) -> relax.Function:
    """Return ``function`` without the removable bindings that nothing reads."""
    if not isinstance(function.body, relax.SeqExpr):
        return function
    read = set(relax.analysis.free_vars(function.body.body))
    blocks, removed = [], 0
    for block in reversed(function.body.blocks):
        kept = []
        for binding in reversed(block.bindings):
            if binding.var not in read and removable(binding):
                continue
            read.update(relax.analysis.free_vars(binding.value))
            kept.append(binding)
        removed += len(block.bindings) - len(kept)
        whole = len(kept) == len(block.bindings)
        blocks.append(block if whole else type(block)(kept[::-1], block.span))
    if not removed:
        return function
    report.rewrote(removed)
    body = relax.SeqExpr(blocks[::-1], function.body.body, function.body.span)
    return relax.BlockBuilder().normalize(with_body(function, body))
