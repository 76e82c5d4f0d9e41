"""Estimate the time of each binding of a joint function, in bytes of memory traffic.

The estimate depends on the program alone and not on a measurement, so that all processes that
compile one program choose the same residuals.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_elementwise, is_view, operator_name
from tvmbridge.passes.base import shape_of, value_bytes

# The floating-point operations that a processor does in the time in which it moves one byte.
_OPERATIONS_PER_BYTE = 16
_PRODUCTS = ("matmul", ".mm.", ".bmm.", ".addmm.")


def cost(graph: JointGraph, var: relax.Var) -> int:
    """Return the estimated time of computing ``var`` once, in bytes of memory traffic."""
    value = graph.bound[var]
    if not isinstance(value, relax.Call) or is_view(value):
        return 0
    written = value_bytes(var)
    if is_elementwise(value):
        return written  # It fuses into the loop that reads its result.
    read = sum(map(value_bytes, graph.operands[var]))
    return read + written + _operations(graph, var) // _OPERATIONS_PER_BYTE


def total(graph: JointGraph, variables: Collection[relax.Var] | None = None) -> int:
    """Return the sum of the costs of ``variables``; None: of all bindings."""
    return sum(cost(graph, var) for var in (graph.bound if variables is None else variables))


def _operations(graph: JointGraph, var: relax.Var) -> int:
    """Return the operations of a product, a convolution or an attention; 0 for other operators."""
    name = operator_name(graph.bound[var]) or ""
    tensors = [shape for v in graph.operands[var] if (shape := shape_of(v))]
    if not tensors:
        return 0
    if any(part in f"{name}." for part in _PRODUCTS):
        # The left operand comes before the right one, behind a bias.
        return 2 * _count(var) * tensors[max(0, len(tensors) - 2)][-1]
    if "conv" in name and len(tensors) > 1:
        weight = max(reversed(tensors[1:]), key=len)  # A bias comes after it, a gradient before.
        gradients = "backward" in name
        images = tensors[0] if gradients or "transpose" in name else shape_of(var) or ()
        return 2 * (1 + gradients) * math.prod(images) * math.prod(weight[1:])
    if "attention" in name and len(tensors) > 1:
        return 4 * math.prod(tensors[0]) * tensors[1][-2]
    return 0


def _count(var: relax.Var) -> int:
    return math.prod(shape_of(var) or ())
