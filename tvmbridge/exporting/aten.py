"""Replace ATen calls, which PyTorch's kernels would serve, by Relax operators and loops.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.index.Tensor", ...}', x, i)

After::

    lv = R.call_tir(index, (x, i), out_ty=...)

Requires: nothing. A call stays if its operator is not in :data:`SPELLED`. Guarantees: the results
of eager PyTorch, up to rounding. Runs before: ConvolutionsAsProducts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call, Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.exporting.attention import attention
from tvmbridge.exporting.bags import embedding_bag
from tvmbridge.exporting.elementwise import ELEMENTWISE
from tvmbridge.exporting.maxima import max_pool
from tvmbridge.exporting.nothing import without_elements
from tvmbridge.exporting.recurrent import RECURRENT
from tvmbridge.exporting.reductions import REDUCTIONS
from tvmbridge.exporting.searches import searched
from tvmbridge.exporting.windows import adaptive_average_pool, as_strided, average_pool, unfold
from tvmbridge.kernels.aten_call import aten_call_operator, compiled_call, spec_of, tensors_of
from tvmbridge.legalize.aten import COMPILED
from tvmbridge.legalize.aten.arguments import Arguments, Compile, ComplexTensor, has_complex
from tvmbridge.legalize.aten.scans import cumulative_product
from tvmbridge.legalize.aten.scatters import REDUCED
from tvmbridge.legalize.broadcast import INJECTIVE, OPAQUE, element_of
from tvmbridge.legalize.lets import constant, dtype_of
from tvmbridge.passes.base import PassReport, RelaxPass, shape_of, with_functions
from tvmbridge.passes.base import dtype_of as dtype_of_tensor


@dataclass(frozen=True)
class SpellOutAtenCalls(RelaxPass):
    """Replace ATen calls by Relax operators and loops.

    An embedding look-up also becomes one that never reads memory outside of its table.
    """

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        rewriter = _AtenRewriter(mod, report)
        rewritten = with_functions(mod, rewriter)
        return rewritten if report.rewrites else mod


@mutator
class _AtenRewriter(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, report: PassReport) -> None:
        super().__init__(mod)
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        if getattr(call.op, "name", "") == "relax.take":
            return self._take(call)
        operator = aten_call_operator(call)
        if operator is None or compiled_call(call) is not None:
            return call
        known = without_elements(self.builder_, call, operator, tensors_of(call))
        if known is not None:
            self.report.rewrote()
            return known
        if operator not in SPELLED:
            return call
        arguments = Arguments.of(spec_of(call), tensors_of(call))
        of_pairs = operator not in _PAIRS and has_complex(arguments.values)
        spelled = None if of_pairs else SPELLED[operator](self.builder_, call, arguments)
        if spelled is None:
            self.report.decline(operator, "not with these arguments")
            return call
        self.report.rewrote()
        return spelled

    def _take(self, call: relax.Call) -> relax.Expr:
        """Return a look-up that is safe for an index beyond the table, where PyTorch raises.

        The result for such an index is NaN if the table is floating-point; otherwise the index is
        clipped.
        """
        if call.attrs.mode != "fast" or call.attrs.axis is None:
            return call
        self.report.rewrote()
        mode = "nan" if "float" in dtype_of_tensor(call) else "clip"
        return relax.op.take(call.args[0], call.args[1], int(call.attrs.axis), mode)


def _index(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Compute ``x[i, :, j]``, in which the index tensors broadcast with each other.

    If the indexed dimensions are neighbours, the broadcast dimensions take their place in the
    result. Otherwise the broadcast dimensions come first.
    """
    data, indices = arguments["self"], list(arguments["indices"])
    shape, result = shape_of(data), shape_of(call)
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if shape is None or result is None or not given:
        return None
    if any(dtype_of_tensor(i) not in ("int64", "int32", "int16", "int8") for _, i in given):
        return None
    shapes = [shape_of(i) for _, i in given]
    if any(s is None for s in shapes):
        return None
    rank = max(len(s or ()) for s in shapes)
    places = [d for d, _ in given]
    neighbours = places == list(range(places[0], places[-1] + 1))
    first = places[0] if neighbours else 0

    def compute(x: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        def element(*at: Expr) -> Expr:
            joint, rest = at[first : first + rank], [*at[:first], *at[first + rank :]]
            others, found = iter(rest), dict(zip(places, tensors, strict=True))
            position = [
                _wrapped(element_of(found[d], joint), extent) if d in found else next(others)
                for d, extent in enumerate(shape)
            ]
            return x(*position)

        return te.compute(list(result), element, name="T_index")

    tensors = [data, *(i for _, i in given)]
    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(compute, *tensors, primfunc_name_hint="index", primfunc_attrs=attrs)


def _wrapped(index: Expr, extent: int) -> Expr:
    """Return a non-negative index for a negative one, and clamp the result to the extent."""
    wide = tirx.Cast("int64", index) if dtype_of(index) != "int64" else index
    size, zero = constant(extent, "int64"), constant(0, "int64")
    found = tirx.Select(wide < zero, wide + size, wide)
    return tirx.max(tirx.min(found, constant(extent - 1, "int64")), zero)


def _matmul(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    values = arguments.values
    return relax.op.matmul(values["self"], values["other"] if "other" in values else values["mat2"])


def _concatenation(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Concatenate tensors of any dtypes; empty vectors are skipped, as in eager PyTorch."""
    dtype, pieces = dtype_of_tensor(call), list(arguments["tensors"])
    kept = [piece for piece in pieces if shape_of(piece) != (0,)] or pieces[:1]
    cast = [
        piece if dtype_of_tensor(piece) == dtype else bb.emit(relax.op.astype(piece, dtype))
        for piece in kept
    ]
    return cast[0] if len(cast) == 1 else relax.op.concat(cast, int(arguments["dim"]))


def _is_all_true(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    numbers = bb.emit(relax.op.astype(arguments["self"], "int32"))
    return relax.op.astype(bb.emit(relax.op.min(numbers)), "bool")


def _arange(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return numbers at equal distances; floats are computed in float64, as by PyTorch's kernel."""
    shape, dtype = shape_of(call), dtype_of_tensor(call)
    start, step = arguments.values.get("start", 0), arguments.values.get("step", 1)
    if shape is None or not all(isinstance(n, int | float) for n in (start, step)):
        return None
    wide = "float64" if "float" in dtype else "int64"
    if wide == "int64" and not all(isinstance(n, int) for n in (start, step)):
        return None

    def compute() -> te.Tensor:
        def element(i: Expr) -> Expr:
            place = tirx.Cast(wide, i)
            return tirx.Cast(dtype, constant(start, wide) + place * constant(step, wide))

        return te.compute(shape, element, name="T_arange")

    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(compute, primfunc_name_hint="arange", primfunc_attrs=attrs)


def _in_loops(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return the loops of an operator in a form for which the frontend prefers a kernel.

    Equal elements are sorted in their order, which PyTorch leaves open unless ``stable`` is set.
    """
    tensors = [v for v in arguments.values.values() if isinstance(v, Expr)]
    shapes = [shape_of(t) for t in tensors]
    if any(not shape or not prod(shape) for shape in shapes):
        return None
    index = arguments.values.get("index")
    if dtype_of_tensor(tensors[0]) == "bool" or (
        index is not None and dtype_of_tensor(index) not in ("int64", "int32")
    ):
        return None
    return COMPILED[arguments.op](bb, call, arguments)


def _reduced_by_index(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    loops = REDUCED.get(arguments["reduce"])
    if loops is None or not arguments["include_self"] or not shape_of(call):
        return None
    return None if dtype_of_tensor(call) == "bool" else loops(bb, call, arguments)


def _grouped_products(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Multiply each row by the matrix of its group; ``offs`` has the end of each group.

    Rows after the last group are zero.
    """
    rows, weight, ends = (arguments[name] for name in ("input", "weight", "offs"))
    shapes = [shape_of(t) for t in (rows, weight, call)]
    if any(s is None or not prod(s) for s in shapes):
        return None
    (count, depth), (groups, _, _), result = (s or () for s in shapes)
    dtype = dtype_of_tensor(call)
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype

    def compute(x: te.Tensor, w: te.Tensor, end: te.Tensor) -> te.Tensor:
        each, k = (te.reduce_axis((0, n), name=name) for n, name in ((groups, "g"), (depth, "k")))

        def before(i: Expr) -> Expr:
            ended = tirx.Cast("int64", end(each)) <= i
            return te.sum(tirx.Cast("int64", ended), axis=each)

        group = te.compute((count,), before, name="group")

        def element(i: Expr, j: Expr) -> Expr:
            last = constant(groups - 1, "int64")
            factor = w(tirx.min(group(i), last), k, j)
            return te.sum(tirx.Cast(wide, x(i, k)) * tirx.Cast(wide, factor), axis=k)

        total = te.compute(list(result), element, name="product")

        def kept(i: Expr, j: Expr) -> Expr:
            inside = group(i) < constant(groups, "int64")
            return tirx.Cast(dtype, tirx.Select(inside, total(i, j), constant(0.0, wide)))

        return te.compute(list(result), kept, name="T_grouped")

    tensors = [rows, weight, ends]
    attrs = {"op_pattern": OPAQUE}
    return bb.call_te(compute, *tensors, primfunc_name_hint="grouped", primfunc_attrs=attrs)


def _same_pairs(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Return pairs as they are: a complex tensor is its real and imaginary parts already."""
    operand = arguments["self"]
    return operand.tensor if isinstance(operand, ComplexTensor) else operand


_PAIRS: dict[str, Any] = {
    "aten.view_as_real.default": _same_pairs,
    "aten.view_as_complex.default": _same_pairs,
}
SPELLED: dict[str, Any] = {
    **_PAIRS,
    **RECURRENT,
    **ELEMENTWISE,
    **REDUCTIONS,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.index.Tensor": _index,
    "aten.matmul.default": _matmul,
    **{f"aten.{name}.default": _matmul for name in ("mm", "bmm")},
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten.bucketize.Tensor": searched,
    "aten.searchsorted.Tensor": searched,
    "aten.cumprod.default": cumulative_product,
    "aten.cat.default": _concatenation,
    "aten._is_all_true.default": _is_all_true,
    **{f"aten.arange.{form}": _arange for form in ("default", "start", "start_step")},
    "aten.sort.default": _in_loops,
    "aten.sort.stable": _in_loops,
    "aten.topk.default": _in_loops,
    "aten.scatter_reduce.two": _reduced_by_index,
    "aten.gather.default": _in_loops,
    "aten.index_select.default": _in_loops,
    "transformers.grouped_mm_fallback.default": _grouped_products,
    **{f"aten.max_pool{n}d_with_indices.default": max_pool for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": max_pool for n in (2, 3)},
    "aten.unfold.default": unfold,
    "aten.as_strided.default": as_strided,
    "aten.as_strided_copy.default": as_strided,
    **{f"aten.avg_pool{n}d.default": average_pool for n in (1, 2, 3)},
    **{f"aten._adaptive_avg_pool{n}d.default": adaptive_average_pool for n in (2, 3)},
}
"""Functions that build the Relax of an operator; None for arguments that they do not support."""

__all__ = ["SPELLED", "Compile", "SpellOutAtenCalls"]
