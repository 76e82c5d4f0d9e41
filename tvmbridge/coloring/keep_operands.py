"""The policies ``keep_operands`` and ``keep_casts``: as ``min_cut``, but keep what memory has.

Operators that do not fuse, such as products, read their operands from memory.

A value that backward computes again inside a fused loop is never written to memory. For a matrix
product or an ATen call it would have to be written. On a GPU this takes longer than reading the
value that forward has written. Eager PyTorch keeps these operands too.

If two values take about the same bytes, the policy keeps the one that forward writes anyway. So the
logits are kept, and not their differences from the largest, which would be written beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.min_cut import min_cut
from tvmbridge.coloring.operators import fuses, is_view, operator_name
from tvmbridge.core.reached import reached
from tvmbridge.kernels.aten_call import aten_call_operator
from tvmbridge.passes.base import dtype_of, shape_of
from tvmbridge.passes.relax.dispatch_kernels import HALVES


def keep_operands(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the variables that backward computes itself, instead of reading forward's values."""
    moved = _moved_for_calls(graph)
    once = _read_in_memory(graph, graph.backward, moved) | _sums_in_memory(graph)
    return min_cut(graph, once, written=_written(graph, moved))


def _moved_for_calls(graph: JointGraph) -> frozenset[relax.Var]:
    """Return permuted tensors that ATen calls of forward and of backward read.

    Forward writes them in this order of memory. If backward permuted the tensors again, forward
    would write them in both orders.
    """

    def read(readers: Collection[relax.Var]) -> set[relax.Var]:
        operands = {
            v for call in readers if _is_aten(graph.bound[call]) for v in graph.operands[call]
        }
        return {v for v in operands if operator_name(graph.bound.get(v)) == "relax.permute_dims"}

    return frozenset(read(graph.forward) & read(graph.backward))


def _is_aten(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and aten_call_operator(value) is not None


def _written(graph: JointGraph, moved: frozenset[relax.Var]) -> frozenset[relax.Var]:
    """Return the forward variables that do not fuse, or that operators read which do not fuse.

    Kernels of products in half precision add a bias themselves, and round once. Then the sum is
    written, and the product is not.
    """
    made = {v for v in graph.forward if v in graph.bound and not fuses(graph.bound[v])}
    readers = Counter(v for var in graph.forward for v in graph.operands[var])
    for var in graph.forward:
        value = graph.bound[var]
        if operator_name(value) != "relax.add" or dtype_of(value) not in HALVES:
            continue
        product = value.args[0]
        if readers[product] == 1 and operator_name(graph.bound.get(product)) == "relax.reshape":
            (product,) = graph.operands[product]
        adds_a_bias = readers[product] == 1 and len(shape_of(value.args[1]) or ()) == 1
        if adds_a_bias and product in made:
            made = made - {product} | {var}
    return _read_in_memory(graph, graph.forward, moved) | made


def _sums_in_memory(graph: JointGraph) -> frozenset[relax.Var]:
    """Sums of two tensors that several operators of forward read, such as a residual stream's.

    Forward writes them anyway. Backward would read both operands, and write the sum, to repeat one.
    """
    readers = Counter(v for var in graph.forward if var in graph.bound for v in graph.operands[var])
    return frozenset(
        var
        for var, value in graph.bound.items()
        if var in graph.forward
        and readers[var] > 1
        and operator_name(value) == "relax.add"
        and len(graph.operands[var]) > 1
        and all(shape_of(v) == shape_of(var) for v in graph.operands[var])
    )


def read_in_memory(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the forward variables that operators of backward read, directly or through views.

    Only operators that do not fuse count, since they read their operands from memory.
    """
    return _read_in_memory(graph, graph.backward)


def _read_in_memory(
    graph: JointGraph, readers: Collection[relax.Var], moved: Collection[relax.Var] = ()
) -> frozenset[relax.Var]:
    """Return what ``readers`` that do not fuse read, directly or through views not in ``moved``."""

    def is_read_through(var: relax.Var) -> bool:
        return var in graph.bound and is_view(graph.bound[var]) and var not in moved

    read = [v for var in readers if not fuses(graph.bound[var]) for v in graph.operands[var]]
    found = reached(read, lambda var: graph.operands[var] if is_read_through(var) else ())
    return frozenset(v for v in found if v in graph.forward and not is_read_through(v))


def keep_casts(graph: JointGraph) -> frozenset[relax.Var]:
    """Return what backward computes itself: as ``min_cut``, but casts of weights are kept.

    Under autocast, forward and backward multiply by the same weights in half precision. Casting
    them again takes longer than reading the casts, which eager PyTorch keeps too.
    """
    once = {var for var in read_in_memory(graph) if _narrows_a_primal(graph, var)}
    return min_cut(graph, frozenset(once))


def _narrows_a_primal(graph: JointGraph, var: relax.Var) -> bool:
    """Whether ``var`` is a cast of a primal, or of a view of one, to a narrower float dtype."""
    value = graph.bound.get(var)
    if value is None or operator_name(value) != "relax.astype":
        return False
    source = value.args[0]
    if _float_bits(value) >= _float_bits(source):
        return False
    while source in graph.bound and is_view(graph.bound[source]):
        (source,) = graph.operands[source]
    return source in graph.primals


def _float_bits(expr: relax.Expr) -> int:
    return {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}.get(dtype_of(expr), 0)
