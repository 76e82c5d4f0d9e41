"""Compute attention in half precision by tvmbridge's kernel for tensor cores.

Before, with q, k and v of (8, 12, 128, 64) that are views of a product's result x::

    lv = R.call_pure_packed("tvmbridge.aten", "...scaled_dot_product_attention...", q, k, v)

After::

    lv1 = R.call_tir(attention, (x, x, x), out_ty=R.Tensor((8, 128, 12, 64), "float16"))
    lv = R.permute_dims(lv1, axes=[0, 2, 1, 3])

The kernel reads the operands with strides, through slices, reshapes and permutations.

Requires: static shapes. Attention of other dtypes, or of heads for which there is no kernel, stays.
Guarantees: the results, with scores and sums in float32. Runs before: SpellOutAtenCalls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import aten_call_operator, spec_of, tensors_of
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.broadcast import OPAQUE
from tvmbridge.passes.base import (
    PERMUTATION,
    RESHAPES,
    PassReport,
    RelaxPass,
    dtype_of,
    is_call,
    map_calls,
    permutation,
    shape_of,
)
from tvmbridge.schedules.gpu.attention import (
    AttentionForm,
    StridedOperand,
    gpu_attention,
    has_attention,
)
from tvmbridge.schedules.gpu.products import HALVES

_OPERATOR = "aten.scaled_dot_product_attention.default"
Lookup = Callable[[relax.Var], relax.Expr | None]


@dataclass(frozen=True)
class AttentionOnGpu(RelaxPass):
    """Replace calls of attention in half precision by a kernel of tvmbridge."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            if aten_call_operator(call) != _OPERATOR:
                return call
            arguments = Arguments.of(spec_of(call), tensors_of(call))
            found = _form(arguments, builder.lookup_binding)
            if found is None:
                report.decline(_OPERATOR, "there is no kernel for it")
                return call
            report.rewrote()
            form, operands = found
            dtype = dtype_of(arguments["query"])
            kernel = gpu_attention(form, dtype).with_attr("op_pattern", OPAQUE)
            callee = builder.add_func(kernel, "attention")
            shape = (form.batch, form.rows, form.heads, form.depth)
            by_rows = relax.call_tir(callee, operands, relax.TensorType(shape, dtype))
            result = builder.emit(relax.op.permute_dims(builder.emit(by_rows), [0, 2, 1, 3]))
            return _shaped(builder, result, shape_of(call) or ())

        return map_calls(mod, rewrite, report)


def _shaped(builder: relax.BlockBuilder, value: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    return value if shape_of(value) == shape else builder.emit(relax.op.reshape(value, shape))


def _form(arguments: Arguments, lookup: Lookup) -> tuple[AttentionForm, list[relax.Expr]] | None:
    """Return the form of an attention and the tensors that the kernel reads; None: no kernel."""
    tensors = [arguments[name] for name in ("query", "key", "value")]
    shapes = [shape_of(tensor) for tensor in tensors]
    if dtype_of(tensors[0]) not in HALVES or arguments["dropout_p"]:
        return None
    if any(s is None or len(s) != 4 for s in shapes):
        return None
    (batch, heads, rows, depth), key, value = (s or () for s in shapes)
    if key != value or key[0] != batch or key[3] != depth:
        return None
    if heads % key[1] or (heads != key[1] and not arguments["enable_gqa"]):
        return None
    mask = _mask(arguments["attn_mask"], (batch, heads, rows, key[2]))
    if mask is None and arguments["attn_mask"] is not None:
        return None
    given = [strided(tensor, lookup) for tensor in tensors]
    scale = arguments["scale"]
    form = AttentionForm(
        batch,
        heads,
        key[1],
        rows,
        key[2],
        depth,
        given[0][1],
        given[1][1],
        given[2][1],
        mask,
        "" if mask is None else dtype_of(arguments["attn_mask"]),
        bool(arguments["is_causal"]),
        1 / math.sqrt(depth) if scale is None else float(scale),
    )
    masks = [] if mask is None else [arguments["attn_mask"]]
    return (form, [*(root for root, _ in given), *masks]) if has_attention(form) else None


def _mask(mask: relax.Expr | None, shape: tuple[int, ...]) -> StridedOperand | None:
    own = None if mask is None else shape_of(mask)
    if mask is None or own is None or dtype_of(mask) not in ("bool", *HALVES):
        return None
    try:
        view = torch.empty(own, device="meta").expand(shape)
    except RuntimeError:
        return None
    return StridedOperand(own, 0, view.stride())


def strided(tensor: relax.Expr, lookup: Lookup) -> tuple[relax.Expr, StridedOperand]:
    """Return the tensor that ``tensor`` is a view of, and where its elements are in that.

    The view is one through slices, reshapes and permutations, with rows that the kernel can read.
    """
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    best, root = None, tensor
    while True:
        shape = shape_of(root)
        if shape is None:
            break
        try:
            view = torch.empty(shape, device="meta")
            for step in reversed(steps):
                view = step(view)
        except RuntimeError:
            break
        operand = StridedOperand(shape, int(view.storage_offset()), tuple(view.stride()))
        if best is None or operand.is_aligned:
            best = root, operand
        value = lookup(root) if isinstance(root, relax.Var) else None
        if isinstance(value, relax.Var):
            root = value
            continue
        found = _step(value, shape)
        if found is None or not isinstance(value, relax.Call):
            break
        steps.append(found)
        root = value.args[0]
    assert best is not None, "attention has static shapes"
    return best


def _step(
    value: relax.Expr | None, shape: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the view of PyTorch that ``value`` is of its operand; None if it is none."""
    if is_call(value, PERMUTATION):
        axes = permutation(value)
        return lambda t: t.permute(axes)
    if isinstance(value, relax.Call) and getattr(value.op, "name", "") in RESHAPES:
        return lambda t: t.view(shape)
    if is_call(value, "relax.strided_slice"):
        axes, begins, _, *steps = ([int(n) for n in group] for group in value.args[1:])
        if not steps or all(n == 1 for n in steps[0]):
            return lambda t: _sliced(t, axes, begins, shape)
    return None


def _sliced(
    tensor: torch.Tensor, axes: list[int], begins: list[int], shape: tuple[int, ...]
) -> torch.Tensor:
    for axis, begin in zip(axes, begins, strict=True):
        first = begin + tensor.shape[axis] if begin < 0 else begin
        tensor = tensor.narrow(axis, first, shape[axis])
    return tensor


__all__ = ["AttentionOnGpu", "strided"]
