"""Several casts of tensors of one shape become one kernel, if no kernel between reads the results.

Before::

    with R.dataflow():
        q = R.call_tir(cast, (w_q,), out_ty=R.Tensor((768, 768), "bfloat16"))
        x_q = R.call_pure_packed("tvmbridge.matmul", ..., x, q)
        k = R.call_tir(cast, (w_k,), out_ty=R.Tensor((768, 768), "bfloat16"))

After::

    with R.dataflow():
        merged = R.call_tir(fused_cast_cast, (w_q, w_k), out_ty=[R.Tensor(...), R.Tensor(...)])
        q = merged[0]
        k = merged[1]
        x_q = R.call_pure_packed("tvmbridge.matmul", ..., x, q)

Autocast casts every weight in forward and every gradient of a weight in backward. These casts are
half of the kernels of a small language model's step. Launching one takes longer than most of them
run.

Requires: kernels are TIR functions without a schedule; a target is set.
Guarantees: each element is computed as before. A cast moves to the first cast of its group, if the
operand is computed before that one. Otherwise it moves to the last cast, if nothing reads the
result before that one.
Runs after: MergeKernels. Runs before: schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, shape_of
from tvmbridge.passes.relax.merge_kernels import Kernels, Rule
from tvmbridge.passes.relax.tir_calls import (
    Node,
    TirCall,
    bindings_made,
    defined,
    nodes_of,
    reads_of,
)

# A larger cast takes longer than its launch; each kernel of a group keeps its operands alive.
_MOST_ELEMENTS = 1 << 22
_MOST_CASTS = 8


@dataclass(frozen=True)
class MergeCasts(RelaxPass):
    """Merge equal kernels of one operand and one result that do not depend on each other.

    ``rule`` returns whether a function, merged of some parts or of none, is one kernel.
    """

    rule: Rule

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        kernels = Kernels(mod, tvm.target.Target.current(), self.rule)
        return kernels.rewritten(_with_merged_casts, report)


@dataclass
class _Group:
    """Casts by one function.

    - ``members``: their places, in order.
    - ``place``: the place of the merged kernel.
    - ``hoists``: whether the others move to the first one; None while there is only one.
    """

    members: list[int]
    place: int
    hoists: bool | None = None


@dataclass
class _Places:
    """The places of definitions and of first reads, by variable, as kernels move."""

    defined: dict[relax.Var, int] = field(default_factory=dict)
    read: dict[relax.Var, int] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> _Places:
        places = cls()
        for number, node in enumerate(nodes):
            places.defined |= dict.fromkeys(defined(node), number)
            for var in reads_of(node):
                places.read.setdefault(var, number)
        return places

    def joined(self, group: _Group, number: int, nodes: Sequence[Node]) -> bool:
        """Add the cast at ``number`` to a group, if its result is the same there."""
        (operand,) = reads_of(nodes[number])
        if len(group.members) == _MOST_CASTS:
            return False
        if group.hoists is not False and self.defined.get(operand, -1) < group.place:
            group.hoists = True
            self.read[operand] = min(self.read[operand], group.place)
        else:
            results = [var for place in group.members for var in defined(nodes[place])]
            first = min((self.read[var] for var in results if var in self.read), default=number + 1)
            if group.hoists or first <= number:
                return False
            group.hoists, group.place = False, number
            self.defined |= dict.fromkeys(results, number)
        group.members.append(number)
        return True


def _groups(nodes: Sequence[Node], kernels: Kernels) -> list[_Group]:
    """Return the groups of at least two casts."""
    places, found = _Places.of(nodes), list[_Group]()
    open_: dict[tvm.ir.GlobalVar, _Group] = {}
    for number, node in enumerate(nodes):
        if not isinstance(node, TirCall) or not _is_small_cast(node, kernels):
            continue
        group = open_.get(node.callee)
        if group is None or not places.joined(group, number, nodes):
            open_[node.callee] = _Group([number], number)
            found.append(open_[node.callee])
    return [group for group in found if len(group.members) > 1]


def _is_small_cast(node: TirCall, kernels: Kernels) -> bool:
    """Whether a call computes each element of a small result from one operand."""
    if len(node.args) != 1 or len(node.reads) != 1 or len(node.results) != 1:
        return False
    shape = shape_of(node.results[0])
    if shape is None or shape != shape_of(node.args[0]) or prod(shape) > _MOST_ELEMENTS:
        return False
    kernel = kernels.parsed(node.callee)
    if kernel is None or len(kernel.stages) != 1:
        return False
    return kernel.stages[0].reduction is None


def _as_one(calls: Sequence[TirCall], kernels: Kernels) -> TirCall | None:
    """Return one kernel for several; None if the rule has none."""
    whole: TirCall | None = calls[0]
    for call in calls[1:]:
        whole = None if whole is None else kernels.both(whole, call)
    return whole


def _with_merged_casts(kernels: Kernels, block: relax.DataflowBlock) -> relax.DataflowBlock:
    nodes = nodes_of(block, kernels.uses)
    merged: dict[int, TirCall] = {}
    gone: set[int] = set()
    for group in _groups(nodes, kernels):
        calls = [
            node for node in map(nodes.__getitem__, group.members) if isinstance(node, TirCall)
        ]
        whole = _as_one(calls, kernels)
        if whole is not None:
            merged[group.place] = whole
            gone |= set(group.members)
    if not merged:
        return block
    kept = [
        merged.get(number, node)
        for number, node in enumerate(nodes)
        if number in merged or number not in gone
    ]
    return relax.DataflowBlock([b for node in kept for b in bindings_made(node, kernels.builder)])
