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
from functools import cached_property
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvmbridge.passes.base import PassReport, RelaxPass, is_call, with_span
from tvmbridge.passes.relax.merged_functions import (
    merged,
    merged_kernel,
    renamed,
    share_variables,
)
from tvmbridge.schedules import is_one_nest, is_scheduled
from tvmbridge.schedules.kernel import Kernel, parse

# Longer loop bodies take long to compile, and need more registers than the machine has.
_MOST_STAGES = 48
_LONGEST_NAME = 200


Rule: TypeAlias = Callable[[Kernel, tuple[Kernel, ...], tvm.target.Target], bool]


def _is_one_nest(kernel: Kernel, _: tuple[Kernel, ...], target: tvm.target.Target) -> bool:
    return is_one_nest(kernel, target)


@dataclass(frozen=True)
class MergeKernels(RelaxPass):
    """Merge kernels with readers of their results, if one loop nest computes both.

    ``rule`` returns whether a function, merged of some parts or of none, is one loop nest.
    """

    rule: Rule = _is_one_nest

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        merging = _Merging(mod, tvm.target.Target.current(), self.rule)
        functions = dict(mod.functions_items())
        for name, function in functions.items():
            if isinstance(function, relax.Function):
                functions[name] = merging.rewrite(function)
        report.rewrote(merging.count)
        if not merging.count:
            return mod
        return tvm.IRModule(
            {**functions, **merging.made}, attrs=mod.attrs, global_infos=mod.global_infos
        )


@dataclass(frozen=True)
class _Kernel:
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


_Node: TypeAlias = _Kernel | relax.Binding


class _Line:
    """The kernels and other bindings of a block, in order; None in place of removed ones."""

    def __init__(self) -> None:
        self.nodes: list[_Node | None] = []
        # The place of the kernel, by each variable of its results.
        self._places: dict[relax.Var, int] = {}
        # The variables that bindings without a kernel read, by the id of the binding.
        self._read: dict[int, frozenset[relax.Var]] = {}

    def extend(self, nodes: Iterable[_Node]) -> None:
        """Append ``nodes``."""
        for node in nodes:
            if isinstance(node, _Kernel):
                self._places.update(dict.fromkeys(node.results, len(self.nodes)))
            else:
                self._read[id(node)] = frozenset(_reads(node))
            self.nodes.append(node)

    def behind(self, place: int) -> list[_Node]:
        """Return the nodes after ``place``."""
        return [node for node in self.nodes[place + 1 :] if node is not None]

    def readers(self, place: int, results: Iterable[relax.Var]) -> list[_Node]:
        """Return the nodes after ``place`` that depend on ``results``."""
        reached, found = set(results), []
        for node in self.behind(place):
            read = node.reads if isinstance(node, _Kernel) else self._read[id(node)]
            if not reached.isdisjoint(read):
                found.append(node)
                reached.update(_defined(node))
        return found

    def source_before(self, place: int, kernel: _Kernel) -> int | None:
        """Return the place of the last kernel before ``place`` whose result ``kernel`` reads."""
        found = (self._places.get(var, place) for var in kernel.reads)
        return max((p for p in found if p < place), default=None)

    def take_out(self, place: int, others: Iterable[_Node]) -> None:
        """Remove the kernel at ``place``, and the nodes ``others`` after it."""
        gone = {id(node) for node in others}
        for at in range(place, len(self.nodes)):
            node = self.nodes[at]
            if at == place or id(node) in gone:
                self.nodes[at] = None
                for var in node.results if isinstance(node, _Kernel) else ():
                    del self._places[var]


class _Merging:
    """Merges the kernels of a module; ``made`` has the functions of the merged kernels."""

    def __init__(
        self, mod: tvm.IRModule, target: tvm.target.Target, rule: Rule = _is_one_nest
    ) -> None:
        self.mod, self.target, self.rule, self.count = mod, target, rule, 0
        self.builder = relax.BlockBuilder(mod)
        self.made: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._known: dict[Any, tvm.ir.GlobalVar | None] = {}
        # The parsed functions; None for those that are not one loop nest.
        self._parsed: dict[tvm.ir.GlobalVar, Kernel | None] = {}

    def rewrite(self, function: relax.Function) -> relax.Function:
        """Return ``function`` with merged kernels in its dataflow blocks."""
        before, uses = self.count, _uses(function)
        blocks = [
            self._block(block, uses) if isinstance(block, relax.DataflowBlock) else block
            for block in function.body.blocks
        ]
        if self.count == before:
            return function
        body = self.builder.normalize(relax.SeqExpr(blocks, function.body.body))
        return relax.Function(
            function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
        )

    def _block(self, block: relax.DataflowBlock, uses: Counter[relax.Var]) -> relax.DataflowBlock:
        line = _Line()
        for node in _nodes(block, uses):
            line.extend(self._grown(line, node, uses) if isinstance(node, _Kernel) else [node])
        nodes = line.behind(-1)
        return relax.DataflowBlock([b for node in nodes for b in _bindings(node, self.builder)])

    def _grown(self, line: _Line, kernel: _Kernel, uses: Counter[relax.Var]) -> list[_Node]:
        """Merge ``kernel`` with as many kernels of ``line`` as possible.

        Returns:
            The merged kernel, followed by the nodes that read its results. The nodes, and the
            kernels that were merged, are removed from ``line``.
        """
        behind: list[_Node] = []
        place = line.source_before(len(line.nodes), kernel)
        while place is not None:
            source = line.nodes[place]
            assert isinstance(source, _Kernel)
            after, both = line.readers(place, source.results), None
            if not {var for node in after for var in _defined(node)} & set(kernel.reads):
                both = self._both(source, kernel, uses)
            if both is None:
                place = line.source_before(place, kernel)
                continue
            kernel, behind = both, after + behind
            line.take_out(place, after)
            place = line.source_before(len(line.nodes), kernel)
        return [kernel, *behind]

    def _both(self, first: _Kernel, second: _Kernel, uses: Counter[relax.Var]) -> _Kernel | None:
        """Return one kernel for two; None if they would not be one loop nest."""
        reads = second.reads
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
        both = _Kernel(callee, args, results, second.span)
        uses.subtract(first.reads + reads)
        uses.update(both.reads)
        return both

    def _callee(
        self,
        first: tvm.ir.GlobalVar,
        second: tvm.ir.GlobalVar,
        given: tuple[int, ...],
        kept: tuple[int, ...],
    ) -> tvm.ir.GlobalVar | None:
        """Return the merged function of two; calls with arguments in the same places share it.

        ``given`` and ``kept`` are those of :func:`~.merged_functions.merged`. None if the functions
        would not be one loop nest.
        """
        key = first, second, given, kept
        if key not in self._known:
            kernel = self._merged_kernel(*key)
            self._known[key] = None if kernel is None else self._added(kernel, *key)
        return self._known[key]

    def _merged_kernel(
        self,
        first: tvm.ir.GlobalVar,
        second: tvm.ir.GlobalVar,
        given: tuple[int, ...],
        kept: tuple[int, ...],
    ) -> Kernel | None:
        """Return the merged function as a kernel, before it is built; None if it is not to be."""
        one, other = self._parse(first), self._parse(second)
        if one is None or other is None or len(one.stages) + len(other.stages) > _MOST_STAGES:
            return None
        if share_variables(one, other):
            other = parse(renamed(self._function(second)))
            assert other is not None
        kernel = merged_kernel(one, other, given, kept)
        return kernel if self.rule(kernel, (one, other), self.target) else None

    def _added(
        self,
        kernel: Kernel,
        first: tvm.ir.GlobalVar,
        second: tvm.ir.GlobalVar,
        given: tuple[int, ...],
        kept: tuple[int, ...],
    ) -> tvm.ir.GlobalVar:
        function = merged(self._function(first), self._function(second), given, kept)
        names = [part.name_hint.removeprefix("fused_") for part in (first, second)]
        var = self.builder.add_func(function, "_".join(["fused", *names])[:_LONGEST_NAME])
        self.made[var], self._parsed[var] = function, kernel
        return var

    def _function(self, callee: tvm.ir.GlobalVar) -> tirx.PrimFunc:
        return self.made[callee] if callee in self.made else self.mod[callee]

    def _parse(self, callee: tvm.ir.GlobalVar) -> Kernel | None:
        if callee not in self._parsed:
            function = self._function(callee)
            kernel = None if is_scheduled(function) else parse(function)
            small = kernel is not None and len(kernel.stages) <= _MOST_STAGES
            fits = kernel is not None and small and self.rule(kernel, (), self.target)
            self._parsed[callee] = kernel if fits else None
        return self._parsed[callee]


def _nodes(block: relax.DataflowBlock, uses: Counter[relax.Var]) -> list[_Node]:
    """Return the bindings of a block; a call of a TIR function and its results are one node."""
    fields: dict[relax.Var, list[relax.Binding]] = {}
    for binding in block.bindings:
        if isinstance(binding.value, relax.TupleGetItem):
            fields.setdefault(binding.value.tuple_value, []).append(binding)
    kernels: dict[relax.Var, _Kernel] = {}
    nodes: list[_Node] = []
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
) -> _Kernel | None:
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
    return _Kernel(call.args[0], args, tuple(results), call.span, (binding, *fields))


def _is_tir_call(value: relax.Expr) -> bool:
    return (
        is_call(value, "relax.call_tir")
        and len(value.args) == 2
        and isinstance(value.args[1], relax.Tuple)
    )


def _reads(node: _Node) -> Counter[relax.Var]:
    if isinstance(node, _Kernel):
        return node.reads
    if _is_tir_call(node.value):
        return Counter(arg for arg in node.value.args[1].fields if isinstance(arg, relax.Var))
    return Counter(relax.analysis.free_vars(node.value))


def _defined(node: _Node) -> tuple[relax.Var, ...]:
    return node.results if isinstance(node, _Kernel) else (node.var,)


def _uses(function: relax.Function) -> Counter[relax.Var]:
    """Count how often each variable is read; one that leaves its block is read once more."""
    uses: Counter[relax.Var] = Counter(relax.analysis.free_vars(function.body.body))
    for block in function.body.blocks:
        for binding in block.bindings:
            uses.update(_reads(binding))
            if not isinstance(binding.var, relax.DataflowVar):
                uses[binding.var] += 1
    return uses


def _bindings(node: _Node, builder: relax.BlockBuilder) -> list[relax.Binding]:
    if not isinstance(node, _Kernel):
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
