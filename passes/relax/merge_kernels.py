"""Kernels whose loops run over the same rows become one kernel of several results.

TVM's FuseOps forms groups of one result. Residuals, and values that several gradients depend on,
are results in the middle of a chain of operators, and each of them ends a group.

Before::

    with R.dataflow():
        mean = R.call_tir(fused_mean, (x,), out_ty=R.Tensor((8, 1)))
        centered = R.call_tir(fused_subtract, (x, mean), out_ty=R.Tensor((8, 16)))
        R.output(mean, centered)

After::

    with R.dataflow():
        both = R.call_tir(fused_mean_subtract, (x,), out_ty=[R.Tensor((8, 1)), R.Tensor((8, 16))])
        mean = both[0]
        centered = both[1]
        R.output(mean, centered)

Requires: kernels are TIR functions without a schedule; a target is set.
Guarantees: a kernel and a reader of its result are merged if the schedule rule for loops computes
both in one loop nest, row by row; a backend may have another rule. A value that only the two
kernels read is no longer a result.
Kernels of tvmbridge and of PyTorch stay as they are.
Runs after: FuseTIR, RewriteDataflowReshape. Runs before: schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.passes.base import PassReport, RelaxPass
from tvmbridge.passes.relax.merged_functions import (
    merged,
    merged_kernel,
    renamed,
    share_variables,
)
from tvmbridge.passes.relax.tir_calls import (
    Node,
    TirCall,
    bindings_made,
    defined,
    nodes_of,
    reads_of,
    uses_of,
)
from tvmbridge.schedules import is_one_nest, is_scheduled
from tvmbridge.schedules.kernel import Kernel, parse
from tvmbridge.schedules.machine import Machine

# Longer loop bodies take long to compile, and need more registers than the machine has.
_MOST_STAGES = 48
# A merge that moves more nodes behind the merged kernel is not made: in a model of N equal layers,
# each of N kernels would be compared with N nodes.
_MOST_MOVED = 256
_LONGEST_NAME = 200


Rule: TypeAlias = Callable[[Kernel, tuple[Kernel, ...], tvm.target.Target], bool]


# A function from a dataflow block to one with merged kernels.
Merge: TypeAlias = Callable[["Kernels", relax.DataflowBlock], relax.DataflowBlock]


def _is_one_nest(kernel: Kernel, _: tuple[Kernel, ...], target: tvm.target.Target) -> bool:
    return is_one_nest(kernel, target)


_Var: TypeAlias = tvm.ir.GlobalVar
_Places: TypeAlias = tuple[int, ...]
_Made: TypeAlias = tuple[Kernel, tirx.PrimFunc] | None
# What was made of pairs of functions, in all modules; the oldest are dropped.
_MADE: dict[Any, _Made] = {}
_MOST_MADE = 512


@dataclass(frozen=True)
class MergeKernels(RelaxPass):
    """Merge kernels with readers of their results, if one loop nest computes both.

    ``rule`` returns whether a function, merged of some parts or of none, is one loop nest.
    """

    rule: Rule = _is_one_nest

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        kernels = Kernels(mod, tvm.target.Target.current(), self.rule)
        return kernels.rewritten(Kernels.grown_together, report)


class _Line:
    """The kernels and other bindings of a block, in order; None in place of removed ones."""

    def __init__(self) -> None:
        self.nodes: list[Node | None] = []
        # The place of the kernel, by each variable of its results.
        self._places: dict[relax.Var, int] = {}
        # The places of the nodes that have read each variable, in order; some may be removed.
        self._readers: dict[relax.Var, list[int]] = {}

    def extend(self, nodes: Iterable[Node]) -> None:
        """Append ``nodes``."""
        for node in nodes:
            if isinstance(node, TirCall):
                self._places.update(dict.fromkeys(node.results, len(self.nodes)))
            for var in reads_of(node):
                self._readers.setdefault(var, []).append(len(self.nodes))
            self.nodes.append(node)

    def left(self) -> list[Node]:
        """Return the nodes that have not been removed."""
        return [node for node in self.nodes if node is not None]

    def readers(self, results: Iterable[relax.Var], kernel: TirCall) -> dict[int, Node] | None:
        """Return the nodes that depend on ``results``, in order and by place.

        None if ``kernel`` reads a result of one of them, or if they are too many to be moved.
        """
        found: dict[int, Node] = {}
        waiting = list(results)
        while waiting:
            if len(found) > _MOST_MOVED:
                return None
            for place in self._readers.get(waiting.pop(), ()):
                node = self.nodes[place]
                if node is not None and place not in found:
                    found[place] = node
                    made = defined(node)
                    if not kernel.reads.keys().isdisjoint(made):
                        return None
                    waiting += made
        return dict(sorted(found.items()))

    def source_before(self, place: int, kernel: TirCall) -> int | None:
        """Return the place of the last kernel before ``place`` whose result ``kernel`` reads."""
        found = (self._places.get(var, place) for var in kernel.reads)
        return max((p for p in found if p < place), default=None)

    def take_out(self, places: Iterable[int]) -> None:
        """Remove the kernels and bindings at ``places``."""
        for place in places:
            node, self.nodes[place] = self.nodes[place], None
            for var in node.results if isinstance(node, TirCall) else ():
                del self._places[var]


class Kernels:
    """Merges the kernels of a module.

    - ``made``: the functions of the merged kernels.
    - ``count``: the number of merges.
    - ``uses``: how often each variable of the present function is read.
    """

    def __init__(
        self, mod: tvm.IRModule, target: tvm.target.Target, rule: Rule = _is_one_nest
    ) -> None:
        self.mod, self.target, self.rule, self.count = mod, target, rule, 0
        self.builder = relax.BlockBuilder(mod)
        self.uses: Counter[relax.Var] = Counter()
        self.made: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._known: dict[Any, tvm.ir.GlobalVar | None] = {}
        # The parsed functions; None for those that are not one loop nest.
        self._parsed: dict[tvm.ir.GlobalVar, Kernel | None] = {}

    def rewritten(self, merge: Merge, report: PassReport) -> tvm.IRModule:
        """Return the module with the blocks of all functions replaced by what ``merge`` returns."""
        functions = dict(self.mod.functions_items())
        for name, function in functions.items():
            if isinstance(function, relax.Function):
                functions[name] = self.rewrite(function, merge)
        report.rewrote(self.count)
        if not self.count:
            return self.mod
        attrs, infos = self.mod.attrs, self.mod.global_infos
        return tvm.IRModule({**functions, **self.made}, attrs=attrs, global_infos=infos)

    def rewrite(self, function: relax.Function, merge: Merge) -> relax.Function:
        """Return ``function`` with its dataflow blocks replaced by what ``merge`` returns."""
        before, self.uses = self.count, uses_of(function)
        blocks = [
            merge(self, block) if isinstance(block, relax.DataflowBlock) else block
            for block in function.body.blocks
        ]
        if self.count == before:
            return function
        body = self.builder.normalize(relax.SeqExpr(blocks, function.body.body))
        return relax.Function(
            function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
        )

    def grown_together(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Return ``block`` with each kernel merged with kernels whose results it reads."""
        line = _Line()
        for node in nodes_of(block, self.uses):
            line.extend(self._grown(line, node) if isinstance(node, TirCall) else [node])
        made = (bindings_made(node, self.builder) for node in line.left())
        return relax.DataflowBlock([binding for bindings in made for binding in bindings])

    def _grown(self, line: _Line, kernel: TirCall) -> list[Node]:
        """Merge ``kernel`` with as many kernels of ``line`` as possible.

        Returns:
            The merged kernel, followed by the nodes that read its results. The nodes, and the
            kernels that were merged, are removed from ``line``.
        """
        behind: list[Node] = []
        place = line.source_before(len(line.nodes), kernel)
        while place is not None:
            source = line.nodes[place]
            assert isinstance(source, TirCall)
            after = line.readers(source.results, kernel)
            both = None if after is None else self.both(source, kernel)
            if after is None or both is None:
                place = line.source_before(place, kernel)
                continue
            kernel, behind = both, [*after.values(), *behind]
            line.take_out([place, *after])
            place = line.source_before(len(line.nodes), kernel)
        return [kernel, *behind]

    def both(self, first: TirCall, second: TirCall) -> TirCall | None:
        """Return one kernel for two; None if they would not be one loop nest."""
        reads, uses = second.reads, self.uses
        kept = [place for place, var in enumerate(first.results) if uses[var] > reads[var]]
        known = [*first.args, *first.results]
        given = []
        for arg in second.args:
            place = next((i for i, old in enumerate(known) if old.same_as(arg)), len(known))
            known += [arg] if place == len(known) else []
            given.append(place)
        callee = self._callee(first.callee, second.callee, tuple(given), tuple(kept))
        if callee is None:
            return None
        self.count += 1
        args = (*first.args, *known[len(first.args) + len(first.results) :])
        results = (*(first.results[place] for place in kept), *second.results)
        both = TirCall(callee, args, results, second.span)
        uses.subtract(first.reads + reads)
        uses.update(both.reads)
        return both

    def _callee(self, first: _Var, second: _Var, given: _Places, kept: _Places) -> _Var | None:
        """Return the merged function of two; calls with arguments in the same places share it.

        ``given`` and ``kept`` are those of :func:`~.merged_functions.merged`. None if the functions
        would not be one loop nest.
        """
        key = first, second, given, kept
        if key not in self._known:
            made = self._made_before(*key)
            self._known[key] = None if made is None else self._added(*made, first, second)
        return self._known[key]

    def _made_before(self, first: _Var, second: _Var, given: _Places, kept: _Places) -> _Made:
        """Return what an earlier module has made of equal functions; otherwise make it."""
        # While sizes vary, the decisions of a function are recorded with it.
        if self.rule is not _is_one_nest or sizes_vary():
            return self._made(first, second, given, kept)
        parts = StructuralKey(self._function(first)), StructuralKey(self._function(second))
        key = (*parts, given, kept, Machine.of(self.target))
        if key in _MADE:
            return _MADE[key]
        while len(_MADE) >= _MOST_MADE:
            _MADE.pop(next(iter(_MADE)), None)
        made = _MADE[key] = self._made(first, second, given, kept)
        return made

    def _made(self, first: _Var, second: _Var, given: _Places, kept: _Places) -> _Made:
        """Return the merged function as a kernel and as a function; None if it is not to be."""
        kernel = self._merged_kernel(first, second, given, kept)
        if kernel is None:
            return None
        return kernel, merged(self._function(first), self._function(second), given, kept)

    def _merged_kernel(
        self, first: _Var, second: _Var, given: _Places, kept: _Places
    ) -> Kernel | None:
        """Return the merged function as a kernel, before it is built; None if it is not to be."""
        one, other = self.parsed(first), self.parsed(second)
        if one is None or other is None or len(one.stages) + len(other.stages) > _MOST_STAGES:
            return None
        if share_variables(one, other):
            other = parse(renamed(self._function(second)))
            assert other is not None
        kernel = merged_kernel(one, other, given, kept)
        return kernel if self.rule(kernel, (one, other), self.target) else None

    def _added(
        self, kernel: Kernel, function: tirx.PrimFunc, first: _Var, second: _Var
    ) -> tvm.ir.GlobalVar:
        names = [part.name_hint.removeprefix("fused_") for part in (first, second)]
        var = self.builder.add_func(function, "_".join(["fused", *names])[:_LONGEST_NAME])
        self.made[var], self._parsed[var] = function, kernel
        return var

    def _function(self, callee: tvm.ir.GlobalVar) -> tirx.PrimFunc:
        return self.made[callee] if callee in self.made else self.mod[callee]

    def parsed(self, callee: tvm.ir.GlobalVar) -> Kernel | None:
        if callee not in self._parsed:
            function = self._function(callee)
            kernel = None if is_scheduled(function) else parse(function)
            small = kernel is not None and len(kernel.stages) <= _MOST_STAGES
            fits = kernel is not None and small and self.rule(kernel, (), self.target)
            self._parsed[callee] = kernel if fits else None
        return self._parsed[callee]
