"""Distances between rows by a p-norm with a finite p, of two tensors or of one."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.nests import Buffer, dtype_of, emit_nest, local, loops, store, when
from tvmbridge.legalize.broadcast import REDUCTION, element_of, shape_of
from tvmbridge.legalize.functions import is_nan
from tvmbridge.legalize.lets import Lets, constant
from tvmbridge.legalize.reductions import reducer_for


def _power(base: Expr, exponent: float) -> Expr:
    dtype = str(base.ty.dtype)
    name = "powf" if dtype == "float32" else "pow"
    return tirx.call_pure_extern(dtype, name, base, constant(exponent, dtype))


def _term(a: Expr, b: Expr, p: float) -> Expr:
    """Return the term of the p-norm for two coordinates, before the root."""
    lets, dtype = Lets(), str(a.ty.dtype)
    difference = lets.bind(opaque(a - opaque(b, sign="uint")), "d")
    if p == 2:
        return lets.close(difference * difference)
    size = lets.bind(tirx.abs(difference), "size")
    if p == 0:
        zero, one = constant(0.0, dtype), constant(1.0, dtype)
        counted = tirx.Select(size.equal(zero), zero, one)
        return lets.close(tirx.Select(is_nan(size), size, counted))
    return lets.close(size if p == 1 else _power(size, p))


def _root(total: Expr, p: float) -> Expr:
    if p in (0, 1):
        return total
    return tirx.sqrt(total) if p == 2 else _power(total, 1 / p)


def _cdist(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    p, shape, dtype = float(arguments["p"]), shape_of(call), dtype_of(call)
    tensors = [arguments["x1"], arguments["x2"]]
    depth = shape_of(tensors[0])[-1]
    reducer = reducer_for("sum", dtype)

    def compute(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, depth), name="k")

        def element(*i: Expr) -> Expr:
            left = element_of(x, (*i[:-1], k))
            right = element_of(y, (*i[:-2], i[-1], k))
            return reducer(_term(left, right, p), axis=[k])

        total = te.compute(shape, element, name="T_total")
        return te.compute(shape, lambda *i: _root(total(*i), p), name="T_distance")

    attrs = {"op_pattern": REDUCTION}
    return bb.call_te(compute, *tensors, primfunc_name_hint="cdist", primfunc_attrs=attrs)


def _pdist(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit the distances of all pairs of rows ``i < j``, in one dimension."""
    p, x, dtype = float(arguments["p"]), arguments["self"], dtype_of(call)
    rows, depth = shape_of(x)

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        (source,), (target,) = inputs, outputs
        with loops(rows, rows, parallel_work=rows * rows * depth) as (i, j), when(j > i):
            total = local(1, dtype)
            store(total, constant(0, dtype))
            with loops(depth) as (k,):
                store(total, total[0] + _term(source[i, k], source[j, k], p))
            # Pairs of all rows before i come first, then the pairs of row i.
            place = i * (2 * rows - i - 1) // 2 + j - i - 1
            store(target, _root(total[0], p), place)

    return emit_nest(bb, "pdist", [x], [(shape_of(call), dtype)], write)


DISTANCES: dict[str, Compile] = {
    "aten._cdist_forward.default": _cdist,
    "aten._pdist_forward.default": _pdist,
}
