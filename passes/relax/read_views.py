"""Attention and grouped products read their operands where they lie.

Before::

    lv = R.reshape(x, (8, 197, 3, 12, 64))       # x: (8, 197, 2304), the result of a product
    lv1 = R.strided_slice(lv, [2], [0], [1])
    query = R.reshape(lv1, (8, 197, 12, 64))
    ...
    out = tvmbridge.attention(query, key, value)

After::

    out = tvmbridge.attention(x as a view, x as a view, x as a view)

PyTorch's kernels of attention take any strides whose last one is 1. Copies of query, key and value
took a tenth of the time of a vision transformer's layers. A grouped product takes transposed
operands too: the weights of a mixture of experts would be transposed at each call.

Guarantees: each row of a view begins at a multiple of 16 bytes; other operands are copied.

PyTorch's kernels return results in the memory order of what they read. With heads before tokens,
the output and each gradient would be copied into the order of the graph. So the pass declines such
a view if the loops that compute its tensor can write the heads after the tokens.
Runs before: the joint function is split, so that backward keeps the product's result alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.kernels.aten_call import (
    ATEN_CALL,
    aten_call_operator,
    packed_call,
    spec_of,
    tensors_of,
)
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    dtype_of,
    is_call,
    map_calls,
    readers_of,
    shape_of,
)
from tvmbridge.passes.relax.views import VIEWS, viewed

_OPERATORS = (
    "tvmbridge.attention.default",
    "tvmbridge.fused_attention.default",
    "tvmbridge.fused_attention_backward.default",
    "tvmbridge.fused_attention_backward_with_bias.default",
)
# The positions of query, key and value.
_READ: dict[str, tuple[int, ...]]
_READ = {name: (5, 6, 7) if "backward" in name else (0, 1, 2) for name in _OPERATORS}
# The positions of both operands.
_GROUPED = "aten._grouped_mm.default"
_READ[_GROUPED] = (0, 1)
_BY_LIBRARIES = ("relax.matmul", "relax.call_pure_packed")
_ALIGNED_BYTES = 16
_SPLIT = "relax.split"

# Returns the value of a variable, or None.
Lookup = Callable[[relax.Var], Any]


@dataclass(frozen=True)
class ReadViews(RelaxPass):
    """Let attention and grouped products read strided views of tensors."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        # The strides of a view stand in the call's text, which must not depend on sizes.
        if sizes_vary():
            return mod

        shared = _shared_values(mod)

        def rewritten(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            name = aten_call_operator(call)
            if name not in _READ:
                return call
            return _on_views(call, _READ[name], builder.lookup_binding, shared, report)

        changed = map_calls(mod, rewritten)
        return changed if report.rewrites else mod


def _shared_values(mod: tvm.IRModule) -> set[relax.Var]:
    """Return the variables that something else than views reads, or several views."""
    found = set()
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            bound = bindings_of(function)
            for var, readers in readers_of(function).items():
                alone = len(readers) == 1 and readers[0] is not None
                if not (alone and any(is_call(bound[readers[0]], name) for name in VIEWS)):
                    found.add(var)
    return found


def _on_views(
    call: relax.Call,
    positions: tuple[int, ...],
    lookup: Lookup,
    shared: set[relax.Var],
    report: PassReport,
) -> relax.Expr:
    content, tensors = spec_of(call), tensors_of(call)
    for position in positions:
        argument = content["args"][position]
        if list(argument) != ["tensor"]:
            continue
        number = argument["tensor"]
        base, view = _origin(tensors[number], lookup)
        grouped = content["op"] == _GROUPED
        if view is None or view.is_contiguous() or not _is_aligned(view, grouped):
            continue
        if (
            not grouped
            and _has_heads_first(view)
            and base not in shared
            and _is_by_loops(lookup(base))
        ):
            report.decline(str(content["op"]), "results would have heads before tokens")
            continue
        tensors[number] = base
        place = [number, list(view.shape), list(view.stride()), view.storage_offset()]
        content["args"][position] = {"view": place}
        report.rewrote()
    (type_,) = call.ty_args
    return packed_call(ATEN_CALL, json.dumps(content), tensors, type_)


def _origin(expr: relax.Expr, lookup: Lookup) -> tuple[relax.Expr, torch.Tensor | None]:
    """Return the tensor that ``expr`` is a view of, and the view as a meta tensor.

    The view is None if the shape of the tensor is not static, or if a reshape copies.
    """
    steps: list[relax.Expr] = []
    while isinstance(expr, relax.Var) and (value := lookup(expr)) is not None:
        call = lookup(value.tuple_value) if isinstance(value, relax.TupleGetItem) else value
        known = (_SPLIT,) if isinstance(value, relax.TupleGetItem) else VIEWS
        if not any(is_call(call, name) for name in known):
            break
        steps.append(value)
        expr = call.args[0]
    shape = shape_of(expr)
    if shape is None:
        return expr, None
    tensor = torch.empty(shape, dtype=getattr(torch, dtype_of(expr)), device="meta")
    try:
        for step in reversed(steps):
            tensor = _viewed(tensor, step, lookup)
    except RuntimeError:
        return expr, None
    return expr, tensor


def _viewed(tensor: torch.Tensor, step: relax.Expr, lookup: Lookup) -> torch.Tensor:
    """Return the view that one operator, or one field of a split, makes of ``tensor``."""
    if not isinstance(step, relax.TupleGetItem):
        return viewed(tensor, step)
    attrs = lookup(step.tuple_value).attrs
    sections, axis = attrs.indices_or_sections, int(attrs.axis)
    if isinstance(sections, tvm.tirx.IntImm):
        return tensor.tensor_split(int(sections), axis)[step.index]
    return tensor.tensor_split([int(n) for n in sections], axis)[step.index]


def _has_heads_first(view: torch.Tensor) -> bool:
    """Whether a view, (batch, tokens, heads, size), has the tokens of a head one after another."""
    _, tokens, heads, _ = view.shape
    return tokens > 1 and heads > 1 and view.stride(1) < view.stride(2)


def _is_by_loops(value: relax.Expr | None) -> bool:
    """Whether compiled loops compute a value, which then write it in any order."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return False
    name = value.op.name
    return name not in _BY_LIBRARIES and not name.startswith("relax.nn.conv")


def _is_aligned(view: torch.Tensor, grouped: bool) -> bool:
    """Whether each row of a view, or for a grouped product each column, begins where it may."""
    *rest, last = view.stride()
    if grouped and rest[-1] == 1:
        rest[-1], last = last, 1
    starts = (*rest, view.storage_offset())
    return last == 1 and all(n * view.element_size() % _ALIGNED_BYTES == 0 for n in starts)
