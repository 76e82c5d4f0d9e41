"""Equal layers of a long program become calls of one function, until kernels are chosen and fused.

The time of all passes between grows with the number of layers. :class:`UnfoldLayers` puts the
result into the place of each call.

Before::

    with R.dataflow():
        a = R.tanh(R.add(x, w0))
        b = R.tanh(R.add(a, w1))
        c = R.tanh(R.add(b, w2))

After::

    def layer(x, w):  # private
        with R.dataflow():
            y = R.tanh(R.add(x, w))
            out = (y,)

    with R.dataflow():
        a = layer(x, w0)[0]
        b = layer(a, w1)[0]
        c = layer(b, w2)[0]

Requires: all sizes are numbers.
Guarantees: a layer has at least ``group`` bindings, so that an operator is fused with all others up
to about this distance. Functions of fewer than ``least`` bindings stay as they are. Calls within
layers lose their spans, because those of one layer would name the submodule of another.
Runs before: DispatchKernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvmbridge.passes.base import PassReport, RelaxPass, with_body
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination

LAYER = "tvmbridge.layer"
"""The attribute of the function that all equal layers call."""
_PLAIN = (relax.ShapeExpr, relax.ExternFunc, tvm.ir.StringImm, tvm.tirx.IntImm, tvm.tirx.FloatImm)
# Fewer calls of one function are not worth the fusion that ends at the bounds of a layer.
_FEWEST = 8
_WINDOW = 8
_END = 1 << 60


@dataclass(frozen=True)
class FoldLayers(RelaxPass):
    """Make equal parts of a long program calls of one function.

    Args:
        least: the fewest bindings of a function that is folded.
        group: the fewest bindings of a layer; shorter ones are taken together.
    """

    least: int = 6000
    group: int = 128

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        builder = relax.BlockBuilder(mod)
        folded = {}
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and _length(function) >= self.least:
                lines = _NumberedLines(function)
                starts, size = lines.layers(self.group)
                if starts:
                    folded[name] = _Folding(lines, starts, size, builder).folded()
                    report.rewrote(len(starts))
        for name, function in folded.items():
            builder.update_func(name, function)
        return builder.get() if folded else mod


@dataclass(frozen=True)
class UnfoldLayers(RelaxPass):
    """Put the bindings of each layer into the place of its calls."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        layers = {
            name: function
            for name, function in mod.functions_items()
            if isinstance(function, relax.Function) and LAYER in (function.attrs or {})
        }
        if not layers:
            return mod
        functions = {n: f for n, f in mod.functions_items() if n not in layers}
        for name, function in functions.items():
            if isinstance(function, relax.Function):
                functions[name] = _unfolded(function, layers, report)
        unfolded = tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
        # The fields of the tuples that the calls returned become the values themselves.
        return DeadCodeElimination()(relax.transform.CanonicalizeBindings()(unfolded))


def _length(function: relax.Function) -> int:
    blocks = function.body.blocks
    is_one = len(blocks) == 1 and isinstance(blocks[0], relax.DataflowBlock)
    return len(blocks[0].bindings) if is_one else 0


class _NumberedLines:
    """The bindings of a function, as numbers that are equal for equal operators.

    - ``bindings``: the bindings of its only block.
    - ``kinds``: for each binding, the number of its operator, attributes and types.
    - ``reads``: for each binding, the variables that it reads. Binding ``i`` binds variable ``i``;
      other variables have negative numbers.
    - ``variables``: the variables by their numbers.
    - ``last``: for each binding, the last one that reads its variable.
    """

    def __init__(self, function: relax.Function) -> None:
        self.function = function
        self.bindings = list(function.body.blocks[0].bindings)
        self.kinds: list[int] = []
        self.reads: list[list[int]] = []
        self.variables: dict[int, relax.Var] = {}
        self.last = [-1] * len(self.bindings)
        numbers: dict[relax.Var, int] = {}
        kinds: dict[Any, int] = {}
        for i, binding in enumerate(self.bindings):
            key, read = _described(binding)
            self.kinds.append(kinds.setdefault(key or ("alone", i), len(kinds)))
            self.reads.append([numbers.setdefault(var, -1 - len(numbers)) for var in read])
            self.variables.update(zip(self.reads[-1], read, strict=True))
            for number in self.reads[-1]:
                if number >= 0:
                    self.last[number] = i
            numbers[binding.var], self.variables[i] = i, binding.var
        for var in relax.analysis.free_vars(function.body.body):
            if var in numbers and numbers[var] >= 0:
                self.last[numbers[var]] = _END
        for i, binding in enumerate(self.bindings):
            if not isinstance(binding.var, relax.DataflowVar):
                self.last[i] = _END

    def layers(self, group: int) -> tuple[list[int], int]:
        """Return where equal layers start, and how many bindings a layer has; none if too few."""
        start, stop, period = self._longest()
        if not period:
            return [], 0
        size = period * -(-group // period)
        start += self._cut(start, stop, period)
        starts = list(range(start, stop - size + 1, size))
        runs = [list(run) for _, run in groupby(starts, lambda at: self._form(at, size))]
        longest = max(runs, key=len, default=[])
        return (longest, size) if len(longest) >= _FEWEST else ([], 0)

    def _longest(self) -> tuple[int, int, int]:
        """Return start and end of the longest part that repeats itself, and its period."""
        met: dict[tuple[int, ...], int] = {}
        gaps: Counter[int] = Counter()
        for i in range(len(self.kinds) - _WINDOW):
            window = tuple(self.kinds[i : i + _WINDOW])
            if window in met:
                gaps[i - met[window]] += 1
            met[window] = i
        found = (0, 0, 0)
        for period, _ in gaps.most_common(3):
            equal = [a == b for a, b in zip(self.kinds, self.kinds[period:], strict=False)]
            at = 0
            for same, run in groupby(equal):
                length = len(list(run))
                if same and length + period > found[1] - found[0]:
                    found = (at, at + length + period, period)
                at += length
        return found

    def _cut(self, start: int, stop: int, period: int) -> int:
        """Return the offset in the period at which the fewest variables are read later."""
        middle = start + (stop - start) // period // 2 * period
        alive = [0] * period
        for i in range(max(start, middle - 4 * period), middle + period):
            if self.last[i] != _END:
                for cut in range(max(i + 1, middle), min(self.last[i], middle + period - 1) + 1):
                    alive[cut - middle] += 1
        return alive.index(min(alive))

    def _form(self, start: int, size: int) -> Any:
        """Return a description of a layer that is equal for equal ones."""
        beside = self.beside(start, size)
        lines = [
            (self.kinds[i], [n - start if n >= start else (beside[n],) for n in self.reads[i]])
            for i in range(start, start + size)
        ]
        return lines, [i - start for i in self.results(start, size)]

    def beside(self, start: int, size: int) -> dict[int, int]:
        """Return the positions of the variables that a layer reads, in the order of reading."""
        found: dict[int, int] = {}
        for i in range(start, start + size):
            for number in self.reads[i]:
                if number < start:
                    found.setdefault(number, len(found))
        return found

    def results(self, start: int, size: int) -> list[int]:
        """Return the bindings of a layer whose variables are read after it."""
        return [i for i in range(start, start + size) if self.last[i] >= start + size]


def _described(binding: relax.Binding) -> tuple[Any, list[relax.Var]]:
    """Return a key that is equal for equal operators, or None, and the variables that are read."""
    value, of_block = binding.value, isinstance(binding.var, relax.DataflowVar)
    if not isinstance(binding, relax.VarBinding):
        return None, list(relax.analysis.free_vars(value))
    if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
        return ("field", value.index, of_block), [value.tuple_value]
    args = value.args if isinstance(value, relax.Call) else [value]
    operands = [
        operand
        for arg in args
        for operand in (arg.fields if isinstance(arg, relax.Tuple) else (arg,))
    ]
    read = [each for each in operands if isinstance(each, relax.Var)]
    others = [each for each in operands if not isinstance(each, relax.Var)]
    if not all(map(_is_plain, others)):
        return None, list(relax.analysis.free_vars(value))
    parts: list[Any] = [each.ty if isinstance(each, relax.Var) else each for each in operands]
    if isinstance(value, relax.Call):
        parts += [value.op, value.attrs, tvm_ffi.Array(value.ty_args)]
    lengths = tuple(len(a.fields) if isinstance(a, relax.Tuple) else -1 for a in args)
    key = tvm_ffi.StructuralKey(tvm_ffi.Array([*parts, binding.var.ty]))
    return (key, lengths, type(value).__name__, of_block), read


def _is_plain(operand: relax.Expr) -> bool:
    """Whether an operand has no variables, and can be compared without the values of tensors."""
    if isinstance(operand, tvm.ir.GenericConst):
        return not operand.value.shape
    return isinstance(operand, _PLAIN)


class _Folding:
    """Replaces the layers of a function by calls."""

    def __init__(
        self, lines: _NumberedLines, starts: Sequence[int], size: int, builder: relax.BlockBuilder
    ) -> None:
        self.lines, self.starts, self.size, self.builder = lines, starts, size, builder

    def folded(self) -> relax.Function:
        """Return the function with calls, and add the layer to the module."""
        layer = self.builder.add_func(self._layer(self.starts[0]), "layer")
        function, bindings = self.lines.function, list[relax.Binding]()
        end = 0
        for start in self.starts:
            bindings += [*self.lines.bindings[end:start], *self._call(layer, start)]
            end = start + self.size
        block = relax.DataflowBlock([*bindings, *self.lines.bindings[end:]])
        body = self.builder.normalize(relax.SeqExpr([block], function.body.body))
        return with_body(function, body)

    def _layer(self, start: int) -> relax.Function:
        lines = self.lines
        bindings = [_without_span(b) for b in lines.bindings[start : start + self.size]]
        params = [lines.variables[number] for number in lines.beside(start, self.size)]
        fields = [lines.variables[i] for i in lines.results(start, self.size)]
        result = relax.Var("results", relax.TupleType([field.ty for field in fields]))
        whole = relax.VarBinding(result, self.builder.normalize(relax.Tuple(fields)))
        body = relax.SeqExpr([relax.DataflowBlock([*bindings, whole])], result)
        body = self.builder.normalize(body)
        layer = relax.Function(_as_parameters(params), body, result.ty)
        given = dict(zip(params, layer.params, strict=True))
        return copy_with_new_vars(_replacing(layer, given)).with_attr(LAYER, 1)

    def _call(self, layer: tvm.ir.GlobalVar, start: int) -> Iterator[relax.Binding]:
        lines = self.lines
        args = [lines.variables[number] for number in lines.beside(start, self.size)]
        call = self.builder.normalize(relax.Call(layer, args))
        whole = relax.DataflowVar("layer", call.ty)
        yield relax.VarBinding(whole, call)
        for place, i in enumerate(lines.results(start, self.size)):
            field = self.builder.normalize(relax.TupleGetItem(whole, place))
            yield relax.VarBinding(lines.variables[i], field)


def _as_parameters(variables: Sequence[relax.Var]) -> list[relax.Var]:
    return [relax.Var(var.name, var.ty) for var in variables]


def _without_span(binding: relax.Binding) -> relax.Binding:
    value = binding.value
    if not isinstance(value, relax.Call) or value.span is None:
        return binding
    call = relax.Call(value.op, value.args, value.attrs, value.ty_args)
    return relax.VarBinding(binding.var, relax.BlockBuilder().normalize(call))


def _replacing(expr: Any, others: dict[relax.Var, relax.Expr]) -> Any:
    """Return ``expr`` with variables replaced."""

    def other(var: relax.Var, _: Any) -> relax.Expr:
        return others.get(var, var)

    for kind in (relax.Var, relax.DataflowVar):
        expr = tvm_ffi.structural_mutate(expr, (kind, other))
    return expr


def _unfolded(
    function: relax.Function,
    layers: dict[tvm.ir.GlobalVar, relax.Function],
    report: PassReport,
) -> relax.Function:
    blocks = []
    for block in function.body.blocks:
        bindings: list[relax.Binding] = []
        for binding in block.bindings:
            value = binding.value
            layer = layers.get(value.op) if isinstance(value, relax.Call) else None
            if layer is None:
                bindings.append(binding)
                continue
            report.rewrote()
            own = copy_with_new_vars(layer)
            body = _replacing(own.body, dict(zip(own.params, value.args, strict=True)))
            bindings += [each for inner in body.blocks for each in inner.bindings]
            bindings.append(relax.VarBinding(binding.var, body.body))
        blocks.append(type(block)(bindings))
    body = relax.BlockBuilder().normalize(relax.SeqExpr(blocks, function.body.body))
    return with_body(function, body)
