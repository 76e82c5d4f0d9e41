"""Convolutions in half precision, and what lies between them, keep channels last in memory.

Before::

    lv = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])  # x: (8, 64, 56, 56), channels second
    lv1 = R.reshape(b, (1, 64, 1, 1))
    lv2 = R.nn.relu(R.add(lv, lv1))
    lv3 = R.nn.conv2d(lv2, v, padding=[1, 1, 1, 1])

After::

    x1, w1 = R.permute_dims(x, [0, 2, 3, 1]), R.permute_dims(w, [0, 2, 3, 1])
    lv = R.nn.conv2d(x1, w1, padding=[1, 1, 1, 1], data_layout="NHWC", kernel_layout="OHWI")
    lv1 = R.reshape(b, (1, 1, 1, 64))
    lv2 = R.nn.relu(R.add(lv, lv1))
    v1 = R.permute_dims(v, [0, 2, 3, 1])
    lv3 = R.nn.conv2d(lv2, v1, padding=[1, 1, 1, 1], data_layout="NHWC", kernel_layout="OHWI")
    lv4 = R.permute_dims(lv3, [0, 3, 1, 2])

cuDNN's convolutions on tensor cores read channels last. With channels second each convolution
converts its operands and its result, and depthwise convolutions run in slow kernels. In training
the gradients of convolutions, batch norms and poolings have channels last, too. The cast of a
weight to half precision then moves its channels, and the cast of its gradient moves them back.

Requires: the function is not differentiated afterwards; a joint function has its gradients.
Guarantees: values are equal up to the order of sums; a tensor that another operator reads is
permuted back for it. Runs before: DispatchConvolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import aten_call_operator, tensors_of
from tvmbridge.kernels.convolution import Convolution, is_convolution
from tvmbridge.kernels.packed_convolution import PackedForm
from tvmbridge.passes.base import (
    PERMUTATION,
    PassReport,
    RelaxPass,
    bindings_of,
    dtype_of,
    is_call,
    map_functions,
    permutation,
    shape_of,
)
from tvmbridge.passes.relax.image_operators import (
    LAST,
    ImageCall,
    is_pooled_by_loops,
    operands_of,
    pooled_by_loops,
)
from tvmbridge.passes.relax.views import SLICE

_SECOND = [0, 3, 1, 2]
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


Choose = Callable[[Sequence[PackedForm]], Collection[PackedForm]]
"""Returns which of a function's convolutions are to have channels last."""


@dataclass(frozen=True)
class ChannelsLast(RelaxPass):
    """Move the channels of images to the last dimension, from each convolution on.

    Args:
        dtypes: the dtypes of the convolutions that are rewritten.
        choose: chooses among these convolutions; by default all of them are rewritten.
    """

    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    choose: Choose | None = None

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            calls = _convolutions(function)
            if not calls:
                return function
            chosen = None
            if self.choose is not None:
                forms = [form for call in calls if (form := _form(call, self.dtypes)) is not None]
                chosen = frozenset(self.choose(forms))
                if not chosen:
                    report.decline("convolutions", "not measured to be faster with channels last")
                    return function
            return _LayoutMutator(self.dtypes, chosen, report).visit_expr(function)

        rewritten = map_functions(mod, rewrite)
        return rewritten if report.rewrites else mod


@mutator
class _LayoutMutator(PyExprMutator):
    """Emits the calls that read images with channels last.

    - ``chosen``: the convolutions that are rewritten; None: all.
    - ``last``: for a variable with channels second, the one with channels last.
    - ``fields``: for the tuple of an operator on images, the tuple that replaces it, and the
      numbers of the fields that have channels last.
    - ``flat``: for an image reshaped to (batch, channels, pixels), the image with channels last.
    - ``turned``: for a variable of the shape (batch, channels, pixels), the one that it is the
      transpose of.
    """

    def __init__(
        self, dtypes: tuple[str, ...], chosen: Collection[PackedForm] | None, report: PassReport
    ) -> None:
        super().__init__()
        self.dtypes, self.chosen, self.report = dtypes, chosen, report
        self.last: dict[relax.Var, relax.Expr] = {}
        self.fields: dict[relax.Var, tuple[relax.Expr, Collection[int]]] = {}
        self.flat: dict[relax.Var, relax.Expr] = {}
        self.turned: dict[relax.Var, relax.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.fields:
            whole, images = self.fields[value.tuple_value]
            item = relax.TupleGetItem(whole, value.index)
            if value.index in images:
                self._bind_image(var, self.builder_.emit(item))
            else:
                self._bind(var, item)
            return
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            if self._is_tuple_of_images(var, value):
                self.report.rewrote()
                self._bind_fields(var)
                return
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
        self._bind(var, op.permute_dims(image, _SECOND))

    def _bind_fields(self, var: relax.Var) -> None:
        """Bind ``var`` to the fields with channels second; only a reader of the tuple needs it."""
        whole, images = self.fields[var]
        fields = [
            self.builder_.emit(relax.TupleGetItem(whole, i)) for i in range(len(var.ty.fields))
        ]
        for i in images:
            fields[i] = self.builder_.emit(op.permute_dims(fields[i], _SECOND))
        self._bind(var, relax.Tuple(fields))

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        self.builder_.emit_normalized(relax.VarBinding(var, self.builder_.normalize(value)))

    def _is_tuple_of_images(self, var: relax.Var, call: relax.Call) -> bool:
        """Emit a call that returns a tuple of images, and note its fields; False if it is none."""
        if call.op.name == "relax.split" and call.args[0] in self.last:
            sections = call.attrs.indices_or_sections
            is_count = isinstance(sections, int | tvm.tirx.IntImm)
            parts = int(sections) if is_count else [int(n) for n in sections]
            axis = _MOVED[int(call.attrs.axis) % len(LAST)]
            whole = self.builder_.emit(op.split(self.last[call.args[0]], parts, axis))
            self.fields[var] = whole, range(len(var.ty.fields))
            return True
        if not isinstance(var.ty, relax.TupleType):
            return False
        pooled = self._pool(call)
        if pooled is not None:
            self.fields[var] = self.builder_.emit(pooled), (0,)
            return True
        images = self._images(call)
        if images is None:
            return False
        moved = images.with_channels_last(self._with_channels_last, self.visit_expr)
        self.fields[var] = self.builder_.emit(moved), images.fields or ()
        return True

    def _images(self, call: relax.Call) -> ImageCall | None:
        """Return the images of an ATen call if it has a form for channels last that pays."""
        found = ImageCall.of(call)
        if found is None:
            return None
        if found.is_gradient:
            return found if found.dtype in self.dtypes else None
        return found if any(image in self.last for image in found.images) else None

    def _image(self, var: relax.Var, call: relax.Call) -> relax.Expr | None:
        """Return the result of ``call`` with channels last; None if it has no such form."""
        name, operands = call.op.name, operands_of(call)
        if is_convolution(call):
            return self._convolution(call)
        if name == PERMUTATION and permutation(call) == _SECOND:
            return self.visit_expr(call.args[0])
        if aten_call_operator(call) is not None:
            pooled, images = self._pool(call), self._images(call)
            if pooled is None and images is not None:
                pooled = images.with_channels_last(self._with_channels_last, self.visit_expr)
            return None if pooled is None else self.builder_.emit(pooled)
        if _rank(var) != len(LAST):
            return None
        if name == "relax.reshape" and call.args[0] in self.turned:
            return self._unflattened(var, call)
        if not any(a in self.last for a in operands):
            return None
        if name in _ELEMENTWISE:
            moved = [self._with_channels_last(a) for a in call.args]
            again = relax.Call(call.op, moved, call.attrs, call.ty_args, call.span)
            return self.builder_.emit(again)
        if name in _REDUCTIONS:
            return self._reduction(call)
        if name == "relax.concat":
            fields = [self._with_channels_last(f) for f in operands]
            return self.builder_.emit(op.concat(fields, _MOVED[int(call.attrs.axis) % len(LAST)]))
        return self._moved(call)

    def _moved(self, call: relax.Call) -> relax.Expr | None:
        """Return a slice, or a broadcast, of an image with channels last."""
        image, name = self.last.get(call.args[0]), call.op.name
        if image is None:
            return None
        if name == "relax.broadcast_to":
            sizes = shape_of(call.args[1]) or [int(n) for n in call.args[1].values]
            return self.builder_.emit(op.broadcast_to(image, [sizes[axis] for axis in LAST]))
        if name == SLICE:
            axes, *bounds = [[int(n) for n in argument.fields] for argument in call.args[1:]]
            axes = [_MOVED[axis % len(LAST)] for axis in axes]
            return self.builder_.emit(op.strided_slice(image, axes, *bounds))
        return None

    def _unflattened(self, var: relax.Var, call: relax.Call) -> relax.Expr | None:
        """Return the image whose rows of pixels a transposed matrix has as columns."""
        rows, shape = self.turned[call.args[0]], shape_of(var)
        if not self.last or shape is None or shape[:2] != (shape_of(call.args[0]) or ())[:2]:
            return None
        return self.builder_.emit(op.reshape(rows, [shape[axis] for axis in LAST]))

    def _plain(self, var: relax.Var, call: relax.Call) -> relax.Expr | None:
        """Return a result that has no channels second, computed from an image; None otherwise."""
        name, operand = call.op.name, call.args[0] if len(call.args) else None
        if name == PERMUTATION and permutation(call) == [0, 2, 1]:
            if operand in self.flat:
                return op.reshape(self.flat[operand], shape_of(var))
            self.turned[var] = self.visit_expr(operand)
        image = self.last.get(operand)
        if image is None:
            return None
        if name == PERMUTATION and permutation(call) == LAST:
            return image
        if name in _REDUCTIONS and _rank(var) <= 2:
            return self._reduction(call)
        if name == "relax.reshape" and shape_of(var) == _flattened(operand):
            self.flat[var] = image
        return None

    def _convolution(self, call: relax.Call) -> relax.Expr | None:
        convolution, form = Convolution.of(call), _form(call, self.dtypes)
        if convolution is None or form is None:
            return None
        if self.chosen is not None and form not in self.chosen:
            return None
        moved = replace(convolution, channels_last=True, weight_last=True)
        return self.builder_.emit(moved.of_operands(*map(self._with_channels_last, call.args)))

    def _reduction(self, call: relax.Call) -> relax.Expr | None:
        """Return a reduction of an image whose result has its dimensions in the same order."""
        rank, image, axes = len(LAST), self.last[call.args[0]], call.attrs.axis
        axes = [int(a) % rank for a in (range(rank) if axes is None else axes)]
        kept = [axis for axis in range(rank) if axis not in axes]
        keepdims = bool(call.attrs.keepdims)
        if not keepdims and [_MOVED[a] for a in kept] != sorted(_MOVED[a] for a in kept):
            return None
        reduce = getattr(op, call.op.name.removeprefix("relax."))
        return self.builder_.emit(reduce(image, sorted(_MOVED[a] for a in axes), keepdims))

    def _pool(self, call: relax.Call) -> relax.Expr | None:
        """Return a pooling that loops compute; None if the call is no such pooling of an image."""
        if not is_pooled_by_loops(call) or tensors_of(call)[0] not in self.last:
            return None
        return pooled_by_loops(call, self.last[tensors_of(call)[0]])

    def _with_channels_last(self, expr: relax.Expr) -> relax.Expr:
        """Return an operand of an image's operator, with its dimensions aligned at the end."""
        if expr in self.last:
            return self.last[expr]
        value, shape = self.visit_expr(expr), shape_of(expr)
        if not shape:
            return value
        full = (*(1,) * (len(LAST) - len(shape)), *shape)
        moved = [axis for axis in LAST if full[axis] > 1]
        if moved == sorted(moved):
            return self.builder_.emit(op.reshape(value, [full[axis] for axis in LAST]))
        bound = self.lookup_binding(value) if isinstance(value, relax.Var) else None
        if full == shape and is_call(bound, "relax.astype"):
            # Backward keeps the cast value, which then has its channels last already.
            first = self.builder_.emit(op.permute_dims(bound.args[0], LAST))
            return self.builder_.emit(op.astype(first, dtype_of(value)))
        if full != shape:
            value = self.builder_.emit(op.reshape(value, full))
        return self.builder_.emit(op.permute_dims(value, LAST))


def has_convolutions(mod: tvm.IRModule) -> bool:
    """Whether a graph of ``mod`` has a convolution."""
    functions = (f for _, f in mod.functions_items() if isinstance(f, relax.Function))
    return any(map(_convolutions, functions))


def _convolutions(function: relax.Function) -> list[relax.Call]:
    return [value for value in bindings_of(function).values() if is_convolution(value)]


def _form(call: relax.Call, dtypes: tuple[str, ...]) -> PackedForm | None:
    """Return the sizes of a convolution of images whose channels may move; None for others."""
    convolution = Convolution.of(call)
    if convolution is None or convolution.transposed or len(convolution.stride) != 2:
        return None
    if dtype_of(call) not in dtypes or convolution.channels_last:
        return None
    data, weight = map(shape_of, call.args)
    if data is None or weight is None:
        return None
    sizes = convolution.stride, convolution.padding, convolution.dilation
    return PackedForm(data, weight, *sizes, convolution.groups)


def _rank(expr: relax.Expr) -> int:
    return expr.ty.ndim if isinstance(expr.ty, relax.TensorType) else -1


def _flattened(image: relax.Expr) -> tuple[int, ...] | None:
    """Return the shape (batch, channels, pixels) of an image."""
    shape = shape_of(image)
    return None if shape is None else (*shape[:2], shape[2] * shape[3])
