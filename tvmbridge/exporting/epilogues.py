"""Compute the element-wise operators that follow a kernel where the kernel stores its result.

Before::

    a = R.call_tir(product, (w, x), out_ty=R.Tensor((64, 3136), "float32"))
    b = R.call_tir(reshape, (a,), out_ty=R.Tensor((1, 64, 56, 56), "float32"))
    c = R.call_tir(add, (b, bias), out_ty=R.Tensor((1, 64, 56, 56), "float32"))
    d = R.call_tir(relu, (c,), out_ty=R.Tensor((1, 64, 56, 56), "float32"))

After::

    e = R.reshape(bias, (64,))
    f = R.call_tir(product_add_relu, (w, x, e), out_ty=R.Tensor((64, 3136), "float32"))
    d = R.reshape(f, (1, 64, 56, 56))

Requires: operators are legalized, and loops of kernels are generated; static shapes.
Guarantees: the same operations on each element. A value that anything else reads stays.
Runs after: LegalizeOps. Runs before: FuseOps.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    binding,
    bindings_of,
    dtype_of,
    is_call,
    readers_of,
    shape_of,
    with_bindings,
)
from tvmbridge.schedules import is_reshape, is_scheduled
from tvmbridge.schedules.epilogues import NotFusedError, ReadOperand, Step, StoreEpilogue, fused
from tvmbridge.schedules.kernel import Kernel, KernelStage, parse
from tvmbridge.schedules.reader import Load, variables

# Operators that may follow one kernel.
_MOST_STEPS = 32
_LONGEST_NAME = 100
# The most bytes of a tensor, as large as the kernel's result, that an operator adds to it. Larger
# ones are read faster by loops of their own: a tile reads a few elements of many rows. Measured: a
# bottleneck of ResNet-50 takes 5% longer with a fused sum of 3.2 MB, and 1% of 0.8 MB.
_MOST_ADDED = 1 << 20
_FLOAT = "float32"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FuseEpilogues(RelaxPass):
    """Fuse kernels of generated loops with the element-wise operators that follow them."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        builder = relax.BlockBuilder(mod)
        changed: dict[Any, relax.Function] = {}
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewritten = _Fuser(mod, function, builder, report).rewritten()
                if rewritten is not None:
                    changed[name] = rewritten
        if not changed:
            return mod
        mod = builder.get()
        for name, function in changed.items():
            mod.update_func(mod.get_global_var(name.name_hint), function)
        return mod


@dataclass
class _EpilogueGroup:
    """A kernel's call with operators that follow it.

    - ``producer``: the variable of the kernel's result.
    - ``shape``: the shape of that result.
    - ``numbers``: the members, with their numbers as in :class:`Step`.
    - ``steps``: the operators.
    - ``operands``: what operators read besides, each with the shape that the kernel reads it in.
    - ``names``: the functions of the members.
    """

    producer: relax.Var
    shape: Shape
    numbers: dict[relax.Var, int]
    names: list[str]
    steps: list[Step] = field(default_factory=list)
    operands: list[tuple[relax.Expr, Shape]] = field(default_factory=list)

    def until(self, steps: int, operands: int) -> _EpilogueGroup:
        """Return the group of the first ``steps`` operators, which read ``operands``."""
        members = {v: n for v, n in self.numbers.items() if n <= steps}
        return _EpilogueGroup(
            self.producer,
            self.shape,
            members,
            self.names[: steps + 1],
            self.steps[:steps],
            self.operands[:operands],
        )

    @property
    def last(self) -> relax.Var:
        return list(self.numbers)[-1]

    @property
    def name(self) -> str:
        return "_".join(self.names)[:_LONGEST_NAME]


class _Fuser:
    def __init__(
        self,
        mod: tvm.IRModule,
        function: relax.Function,
        builder: relax.BlockBuilder,
        report: PassReport,
    ) -> None:
        self.mod, self.function, self.builder, self.report = mod, function, builder, report
        self.bound = bindings_of(function)
        self.places = {var: place for place, var in enumerate(self.bound)}
        self.readers = readers_of(function)
        self.parsed: dict[Any, Kernel | None] = {}
        self.taken: set[relax.Var] = set()

    def rewritten(self) -> relax.Function | None:
        """Return the function with fused calls; None if there are none."""
        made: dict[relax.Var, list[relax.Binding]] = {}
        for var, value in self.bound.items():
            kernel = self._kernel(value)
            if kernel is None or var in self.taken:
                continue
            group = self._group(var, value)
            if group is None:
                continue
            try:
                epilogue = StoreEpilogue(tuple(group.steps), tuple(s for _, s in group.operands))
                loops = fused(kernel, epilogue)
            except NotFusedError:
                self.report.decline(value.args[0].name_hint, "it stores no vectors of its result")
                continue
            self.report.rewrote()
            self.taken |= set(group.numbers)
            made[group.last] = self._call(group, value, loops)
        if not made:
            return None
        bindings: list[relax.Binding] = []
        for block in self.function.body.blocks:
            for each in block.bindings:
                bindings += made.get(each.var, [] if each.var in self.taken else [each])
        return with_bindings(self.function, bindings)

    def _kernel(self, value: relax.Expr) -> tirx.PrimFunc | None:
        """Return the generated loops that ``value`` calls, or None."""
        loops = self._callee(value)
        if loops is None or not is_scheduled(loops) or dtype_of(value) != _FLOAT:
            return None
        return loops

    def _callee(self, value: relax.Expr) -> tirx.PrimFunc | None:
        """Return the TIR function of a call with one result and no other arguments, or None."""
        if not is_call(value, "relax.call_tir") or len(value.args) != 2:
            return None
        if not isinstance(value.args[1], relax.Tuple) or shape_of(value) is None:
            return None
        callee = self.mod[value.args[0]]
        return callee if isinstance(callee, tirx.PrimFunc) else None

    def _group(self, producer: relax.Var, value: relax.Call) -> _EpilogueGroup | None:
        """Return the largest group of which nothing but the last result is read elsewhere."""
        shape = shape_of(value) or ()
        group = _EpilogueGroup(producer, shape, {producer: 0}, [value.args[0].name_hint])
        found: tuple[int, int] | None = None
        pending = [self.places[r] for r in self.readers[producer] if r in self.places]
        order = list(self.bound)
        heapq.heapify(pending)
        seen: set[int] = set()
        while pending and len(group.steps) < _MOST_STEPS:
            place = heapq.heappop(pending)
            if place in seen:
                continue
            seen.add(place)
            if not self._join(group, order[place]):
                continue
            for reader in self.readers[order[place]]:
                if reader in self.places:
                    heapq.heappush(pending, self.places[reader])
            if self._is_closed(group):
                found = len(group.steps), len(group.operands)
        return None if found is None else group.until(*found)

    def _is_closed(self, group: _EpilogueGroup) -> bool:
        *inner, _ = group.numbers
        return all(reader in group.numbers for var in inner for reader in self.readers[var])

    def _join(self, group: _EpilogueGroup, var: relax.Var) -> bool:
        """Add the operator that computes ``var`` to a group, if it is element-wise."""
        value = self.bound[var]
        loops = self._callee(value)
        if var in self.taken or loops is None or is_scheduled(loops):
            return False
        shape, callee = shape_of(value) or (), value.args[0]
        if callee not in self.parsed:
            self.parsed[callee] = parse(loops)
        kernel, args = self.parsed[callee], value.args[1].fields
        if kernel is None or len(kernel.stages) != 1 or prod(shape) != prod(group.shape):
            return False
        stage = kernel.stages[0]
        if is_reshape(kernel):
            if args[0] not in group.numbers or dtype_of(value) != _FLOAT:
                return False
            step: Step | None = Step(None, (group.numbers[args[0]],))
        else:
            sources = dict(zip(kernel.params, args, strict=False))
            step = _step(group, stage, [sources.get(read.buffer) for read in stage.loads])
        if step is None:
            return False
        group.steps.append(step)
        group.numbers[var] = len(group.steps)
        group.names.append(callee.name_hint)
        return True

    def _call(
        self, group: _EpilogueGroup, value: relax.Call, loops: tirx.PrimFunc
    ) -> list[relax.Binding]:
        """Return the bindings of a fused call."""
        callee = self.builder.add_func(loops, group.name)
        bindings, operands = [], []
        for operand, shape in group.operands:
            if shape_of(operand) != shape:
                var = relax.DataflowVar("operand", relax.TensorType(shape, _FLOAT))
                bindings.append(binding(var, relax.op.reshape(operand, shape)))
                operand = var
            operands.append(operand)
        call = relax.call_tir(
            callee, [*value.args[1].fields, *operands], relax.TensorType(group.shape, _FLOAT)
        )
        shape = shape_of(group.last) or ()
        if shape == group.shape:
            return [*bindings, binding(group.last, call)]
        result = relax.DataflowVar("fused", relax.TensorType(group.shape, _FLOAT))
        view = binding(group.last, relax.op.reshape(result, shape))
        return [*bindings, binding(result, call), view]


def _step(group: _EpilogueGroup, stage: KernelStage, args: list[relax.Expr | None]) -> Step | None:
    """Return the step of an operator whose loads read ``args``; None if it is not element-wise.

    The operands that it reads are added to the group; none may be large.
    """
    names = {read.slot for read in stage.loads} | {var for var, _ in stage.binds}
    used = variables(stage.value).union(*(variables(bound) for _, bound in stage.binds))
    dtypes = {str(stage.buffer.dtype), *(str(read.buffer.dtype) for read in stage.loads)}
    if stage.reduction or not stage.vectorizable or dtypes != {_FLOAT} or not used <= names:
        return None
    sources: list[ReadOperand | int] = []
    added: list[tuple[relax.Expr, Shape]] = []
    for read, arg in zip(stage.loads, args, strict=True):
        if arg is None:
            return None
        dims = _dims(group.shape, stage, read)
        if dims is None:
            return None
        if arg in group.numbers:
            if prod(group.shape[d] for d in dims) != prod(group.shape):
                return None
            sources.append(group.numbers[arg])
            continue
        shape = tuple(group.shape[d] for d in dims) or (1,)
        if prod(shape) == prod(group.shape) and 4 * prod(shape) > _MOST_ADDED:
            return None
        sources.append(ReadOperand(len(group.operands) + len(added), dims))
        added.append((arg, shape))
    group.operands += added
    return Step(stage, tuple(sources))


def _dims(shape: Shape, stage: KernelStage, read: Load) -> tuple[int, ...] | None:
    """Return the dimensions of the kernel's result, of ``shape``, that index a read.

    None if the read takes its elements in another order, or if dimensions of the operator that the
    kernel has as one are broadcast in part.
    """
    extents = [int(n) for n in stage.buffer.shape]
    indexed: list[int] = []
    for index, extent in zip(read.indices, read.buffer.shape, strict=True):
        if int(extent) == 1:
            continue
        place = next(
            (p for p, d in enumerate(stage.dims) if d is not None and d.same_as(index)), -1
        )
        if place < 0 or extents[place] != int(extent) or place <= max(indexed, default=-1):
            return None
        indexed.append(place)
    found: list[int] = []
    for dims, places in matched(shape, extents):
        inside = [place in indexed for place in places]
        if any(inside) != all(inside):
            return None
        found += dims if all(inside) else []
    return tuple(found)


def matched(first: Shape, second: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of dimensions with equal products, of two shapes of one size.

    Dimensions of 1 are in no group.
    """
    left = [d for d, n in enumerate(first) if n > 1]
    right = [d for d, n in enumerate(second) if n > 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while prod(first[d] for d in a) != prod(second[d] for d in b):
            if prod(first[d] for d in a) < prod(second[d] for d in b):
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        groups.append((a, b))
    return groups
