"""The policy ``keep_casts``: as ``min_cut``, but weights that forward casts are kept.

Under autocast, forward and backward multiply by the same weights in half precision. Casting them
again takes longer than reading the casts of forward, and eager PyTorch keeps the casts too. Without
casts this policy equals ``min_cut``.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.keep_operands import read_in_memory
from tvmbridge.coloring.min_cut import min_cut
from tvmbridge.coloring.operators import is_view, operator_name
from tvmbridge.passes.base import dtype_of


def keep_casts(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the variables that backward computes itself, instead of reading forward's values."""
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
