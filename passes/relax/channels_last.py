"""Convolutions in half precision, and what lies between them, keep channels last in memory.

Before::

    lv = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])  # x: (8, 64, 56, 56), channels second
    lv1 = R.reshape(b, (1, 64, 1, 1))
    lv2 = R.nn.relu(R.add(lv, lv1))
    lv3 = R.nn.conv2d(lv2, v, padding=[1, 1, 1, 1])

After::

    x1 = R.permute_dims(x, [0, 2, 3, 1])
    lv = R.nn.conv2d(x1, w, padding=[1, 1, 1, 1], data_layout="NHWC")
    lv1 = R.reshape(b, (1, 1, 1, 64))
    lv2 = R.nn.relu(R.add(lv, lv1))
    lv3 = R.nn.conv2d(lv2, v, padding=[1, 1, 1, 1], data_layout="NHWC")
    lv4 = R.permute_dims(lv3, [0, 3, 1, 2])

cuDNN's convolutions on tensor cores read channels last. With channels second each convolution
converts its operands and its result, and depthwise convolutions run in slow kernels.

Requires: the function is not differentiated afterwards. Guarantees: values are equal up to the
order of sums; a tensor that another operator reads is permuted back for it.
Runs before: DispatchConvolutions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import (
    ATEN_CALL,
    aten_call_operator,
    packed_call,
    spec_of,
    tensors_of,
)
from tvmbridge.kernels.convolution import Convolution, is_convolution
from tvmbridge.legalize.aten.windows_last import pools_by_chains
from tvmbridge.passes.base import (
    PERMUTATION,
    PassReport,
    RelaxPass,
    dtype_of,
    map_functions,
    permutation,
    shape_of,
)

_LAST, _SECOND = [0, 2, 3, 1], [0, 3, 1, 2]
# The position, with channels last, of each dimension of a tensor with channels second.
_MOVED = {0: 0, 1: 3, 2: 1, 3: 2}

_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "where", "astype",
        "abs", "ceil", "clip", "cos", "erf", "exp", "floor", "log", "negative", "round", "rsqrt",
        "sigmoid", "sign", "sin", "sqrt", "square", "tan", "tanh", "equal", "not_equal", "greater",
        "greater_equal", "less", "less_equal", "logical_and", "logical_or", "logical_not",
        "nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus",
    )
)  # fmt: skip
_REDUCTIONS = frozenset(f"relax.{name}" for name in ("mean", "sum", "max", "min"))
_POOLS = ("aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default")


@dataclass(frozen=True)
class ChannelsLast(RelaxPass):
    """Move the channels of images to the last dimension, from each convolution on.

    ``dtypes`` are the dtypes of the convolutions that are rewritten.
    """

    dtypes: tuple[str, ...] = ("float16", "bfloat16")

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        rewritten = map_functions(mod, lambda f: _LayoutMutator(self.dtypes, report).visit_expr(f))
        return rewritten if report.rewrites else mod


@mutator
class _LayoutMutator(PyExprMutator):
    """Emits the calls that read images with channels last.

    - ``last``: for a variable with channels second, the one with channels last.
    - ``flat``: for an image reshaped to (batch, channels, pixels), the image with channels last.
    """

    def __init__(self, dtypes: tuple[str, ...], report: PassReport) -> None:
        super().__init__()
        self.dtypes, self.report = dtypes, report
        self.last: dict[relax.Var, relax.Expr] = {}
        self.flat: dict[relax.Var, relax.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.last:
            image = self.builder_.emit(
                relax.TupleGetItem(self.last[value.tuple_value], value.index)
            )
            self._bind_image(var, image)
            return
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            image = self._image(var, value)
            if image is not None:
                self.report.rewrote()
                self._bind_image(var, image)
                return
            plain = self._plain(var, value)
            if plain is not None:
                self.report.rewrote()
                self._bind(var, plain)
                return
        super().visit_var_binding_(binding)

    def _bind_image(self, var: relax.Var, image: relax.Expr) -> None:
        """Bind ``var`` to ``image`` with channels second; nothing may read it."""
        self.last[var] = image
        if isinstance(var.ty, relax.TensorType):
            self._bind(var, op.permute_dims(image, _SECOND))

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        self.builder_.emit_normalized(relax.VarBinding(var, self.builder_.normalize(value)))

    def _image(self, var: relax.Var, call: relax.Call) -> relax.Expr | None:
        """Return the result of ``call`` with channels last; None if it has no such form."""
        name, operands = call.op.name, _operands(call)
        if is_convolution(call):
            return self._convolution(call)
        if name == PERMUTATION and permutation(call) == _SECOND:
            return self.visit_expr(call.args[0])
        if not any(a in self.last for a in operands):
            return None
        if aten_call_operator(call) in _POOLS:
            return self._pool(call)
        if _rank(var) != len(_LAST):
            return None
        if name in _ELEMENTWISE:
            moved = [self._with_channels_last(a) for a in call.args]
            again = relax.Call(call.op, moved, call.attrs, call.ty_args, call.span)
            return self.builder_.emit(again)
        if name in _REDUCTIONS:
            return self._reduction(call)
        if name == "relax.concat":
            fields = [self._with_channels_last(f) for f in operands]
            return self.builder_.emit(op.concat(fields, _MOVED[int(call.attrs.axis) % len(_LAST)]))
        return None

    def _plain(self, var: relax.Var, call: relax.Call) -> relax.Expr | None:
        """Return a result that has no channels second, computed from an image; None otherwise."""
        name, operand = call.op.name, call.args[0] if len(call.args) else None
        if name == PERMUTATION and operand in self.flat and permutation(call) == [0, 2, 1]:
            return op.reshape(self.flat[operand], shape_of(var))
        image = self.last.get(operand)
        if image is None:
            return None
        if name == PERMUTATION and permutation(call) == _LAST:
            return image
        if name in _REDUCTIONS and _rank(var) <= 2:
            return self._reduction(call)
        if name == "relax.reshape" and shape_of(var) == _flattened(operand):
            self.flat[var] = image
        return None

    def _convolution(self, call: relax.Call) -> relax.Expr | None:
        convolution = Convolution.of(call)
        if convolution is None or convolution.transposed or len(convolution.stride) != 2:
            return None
        if dtype_of(call) not in self.dtypes or convolution.channels_last:
            return None
        moved = replace(convolution, channels_last=True)
        operands = self._with_channels_last(call.args[0]), self.visit_expr(call.args[1])
        return self.builder_.emit(moved.of_operands(*operands))

    def _reduction(self, call: relax.Call) -> relax.Expr | None:
        """Return a reduction of an image whose result has its dimensions in the same order."""
        rank, image = len(_LAST), self.last[call.args[0]]
        axes = [int(a) % rank for a in call.attrs.axis or range(rank)]
        kept = [axis for axis in range(rank) if axis not in axes]
        keepdims = bool(call.attrs.keepdims)
        if not keepdims and [_MOVED[a] for a in kept] != sorted(_MOVED[a] for a in kept):
            return None
        reduce = getattr(op, call.op.name.removeprefix("relax."))
        return self.builder_.emit(reduce(image, sorted(_MOVED[a] for a in axes), keepdims))

    def _pool(self, call: relax.Call) -> relax.Expr | None:
        """Return a pooling kernel of images with channels last; None if its indices are read."""
        content = spec_of(call)
        if content["results"] not in (None, [0]):
            return None
        by_loops = pools_by_chains(content)
        first, *rest = content["args"]
        content |= {"args": [{"channels_last": first["tensor"]}, *rest], "channels_last": True}
        content.pop("compiled", None)
        content |= {"compiled": True} if by_loops else {}
        (type_,) = call.ty_args
        fields = type_.fields if isinstance(type_, relax.TupleType) else [type_]
        moved = [
            relax.TensorType([list(t.shape.values)[axis] for axis in _LAST], t.dtype)
            for t in fields
        ]
        result = relax.TupleType(moved) if isinstance(type_, relax.TupleType) else moved[0]
        image = self.last[tensors_of(call)[0]]
        return self.builder_.emit(packed_call(ATEN_CALL, json.dumps(content), [image], result))

    def _with_channels_last(self, expr: relax.Expr) -> relax.Expr:
        """Return an operand of an image's operator, with its dimensions aligned at the end."""
        if expr in self.last:
            return self.last[expr]
        value, shape = self.visit_expr(expr), shape_of(expr)
        if not shape:
            return value
        full = (*(1,) * (len(_LAST) - len(shape)), *shape)
        moved = [axis for axis in _LAST if full[axis] > 1]
        if moved == sorted(moved):
            return self.builder_.emit(op.reshape(value, [full[axis] for axis in _LAST]))
        if full != shape:
            value = self.builder_.emit(op.reshape(value, full))
        return self.builder_.emit(op.permute_dims(value, _LAST))


def _operands(call: relax.Call) -> list[relax.Expr]:
    """Return the operands of ``call``, with a tuple's fields in its place."""
    found: list[relax.Expr] = []
    for operand in call.args:
        found += list(operand.fields) if isinstance(operand, relax.Tuple) else [operand]
    return found


def _rank(expr: relax.Expr) -> int:
    return expr.ty.ndim if isinstance(expr.ty, relax.TensorType) else -1


def _flattened(image: relax.Expr) -> tuple[int, ...] | None:
    """Return the shape (batch, channels, pixels) of an image."""
    shape = shape_of(image)
    return None if shape is None else (*shape[:2], shape[2] * shape[3])
