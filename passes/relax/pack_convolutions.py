"""Convolutions in channels-last layout call a kernel that reads frozen weights in packed form.

Before, as ``relax.transform.ConvertLayout`` leaves it (``w`` and ``b`` are frozen)::

    lv = R.nn.conv2d(x, w, data_layout="NHWC")
    row = R.permute_dims(R.reshape(b, (1, 8, 1, 1)), axes=[0, 2, 3, 1])
    y = R.add(lv, row)

After::

    y = R.call_pure_packed("tvmbridge.packed_convolution", spec, x, packed_0, b)

where ``packed_0``, a new parameter with one integer, identifies the packed weight
(``tvmbridge.kernels.packed``).

Requires: :func:`packable_convolutions` accepts all two-dimensional convolutions. Guarantees: no
such convolution is left, and there is one new parameter for each of the packings.
Runs after: LiftFrozen, PackProducts. Runs before: DispatchConvolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import packed_call
from tvmbridge.kernels.convolution import Convolution
from tvmbridge.kernels.packed_convolution import PACKED_CONVOLUTION, PackedForm
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    dtype_of,
    is_call,
    map_functions,
    readers_of,
    reshaped_vector,
    shape_of,
    with_body,
    with_span,
)
from tvmbridge.passes.relax.pack_products import tickets_of

_CONVOLUTIONS = ("relax.nn.conv2d", "relax.nn.conv2d_transpose")
_VIEWS = ("relax.reshape", "relax.permute_dims", "relax.expand_dims")
Packings = tuple[tuple[str, PackedForm], ...]


def _is_convolution(value: relax.Expr) -> bool:
    return any(is_call(value, name) for name in _CONVOLUTIONS)


def packable_convolutions(
    forward: relax.Function, frozen: tuple[str, ...]
) -> list[tuple[str, PackedForm]] | str:
    """Return the name of the weight and the form of each two-dimensional convolution.

    If the weight of one cannot be packed, return the reason.
    """
    found = []
    for value in bindings_of(forward).values():
        if not _is_convolution(value):
            continue
        form = Convolution.of(value)
        data, weight = value.args
        shapes = shape_of(data), shape_of(weight)
        if form is None or shapes[0] is None or shapes[1] is None:
            return "PyTorch has no such convolution"
        if not isinstance(weight, relax.Var) or weight.name not in frozen:
            return "a weight is computed at each call"
        if dtype_of(value) != "float32":
            return f"the dtype is {dtype_of(value)}"
        options = (form.stride, form.padding, form.dilation, form.groups, form.transposed)
        packed = PackedForm(shapes[0], shapes[1], *options, form.output_padding)
        found.append((weight.name, packed))
    return found


def otherwise_laid_out(forward: relax.Function) -> bool:
    """Whether an operator that is no convolution has a layout with the channels last."""
    for value in bindings_of(forward).values():
        if isinstance(value, relax.Call) and not _is_convolution(value):
            for name in ("layout", "data_layout"):
                if str(getattr(value.attrs, name, "NC")).find("C") > 1:
                    return True
    return False


@dataclass(frozen=True)
class PackConvolutions(RelaxPass):
    """Replace convolutions by calls of the kernel that reads packed weights.

    Args:
        packings: pairs of the name of a weight and the form of the convolution that reads it.
    """

    packings: Packings

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: self._packed(f, report), "forward")

    def _packed(self, forward: relax.Function, report: PassReport) -> relax.Function:
        tickets = tickets_of(forward, self.packings, "packed_weight_")
        body = _ConvolutionPackMutator(forward, tickets, report).visit_expr(forward.body)
        return with_body(forward, body, [*forward.params, *tickets.values()])


def _form_of(call: relax.Call) -> PackedForm:
    attrs, transposed = call.attrs, is_call(call, "relax.nn.conv2d_transpose")
    more = tuple(int(p) for p in attrs.output_padding) if transposed else (0, 0)
    batch, height, width, channels = shape_of(call.args[0]) or ()
    return PackedForm(
        (batch, channels, height, width),
        shape_of(call.args[1]) or (),
        tuple(int(s) for s in attrs.strides),
        tuple(int(p) for p in attrs.padding)[:2],
        tuple(int(d) for d in attrs.dilation),
        int(attrs.groups),
        transposed,
        more,
    )


@mutator
class _ConvolutionPackMutator(PyExprMutator):
    def __init__(
        self,
        forward: relax.Function,
        tickets: dict[tuple[str, PackedForm], relax.Var],
        report: PassReport,
    ) -> None:
        super().__init__()
        self.bound = bindings_of(forward)
        self.tickets = tickets
        self.report = report
        self.readers = readers_of(forward)
        # By the variable of the sum: the convolution's variable, and the bias that is added to it.
        self.biased: dict[relax.Var, tuple[relax.Var, relax.Var]] = {}
        for var, value in self.bound.items():
            self._note_bias(var, value)
        self.bare = {bare for bare, _ in self.biased.values()}

    def _note_bias(self, var: relax.Var, value: relax.Expr) -> None:
        if not is_call(value, "relax.add"):
            return
        for bare, row in (value.args, value.args[::-1]):
            found = self.bound.get(bare) if isinstance(bare, relax.Var) else None
            bias = self._vector(row, shape_of(bare))
            if (
                self._ticket(found) is not None
                and bias is not None
                and len(self.readers[bare]) == 1
            ):
                self.biased[var] = bare, bias
                return

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        # The call for the addition, which is the only reader, computes the convolution too.
        if binding.var in self.bare:
            return
        bare, bias = self.biased.get(binding.var, (None, None))
        packed = self._called(binding.value if bare is None else self.bound[bare], bias)
        if packed is None:
            super().visit_var_binding_(binding)
            return
        packed = self.builder_.normalize(with_span(packed, binding.value.span))
        self.builder_.emit_normalized(relax.VarBinding(binding.var, packed))

    def _called(self, value: relax.Expr | None, bias: relax.Var | None) -> relax.Expr | None:
        if not isinstance(value, relax.Call) or not _is_convolution(value):
            return None
        ticket = self._ticket(value)
        if ticket is None:
            self.report.decline(value.op.name, "not among the packings")
            return None
        self.report.rewrote()
        operands = [self.visit_expr(value.args[0]), ticket, *([] if bias is None else [bias])]
        return packed_call(PACKED_CONVOLUTION, _form_of(value).spec, operands, value.ty)

    def _ticket(self, value: relax.Expr | None) -> relax.Var | None:
        """Return the parameter for the packed weight of ``value``.

        None if ``value`` is no convolution, or is not among the packings.
        """
        if not isinstance(value, relax.Call) or not _is_convolution(value):
            return None
        weight = value.args[1]
        if value.attrs.data_layout != "NHWC" or not isinstance(weight, relax.Var):
            return None
        return self.tickets.get((weight.name, _form_of(value)))

    def _vector(self, row: relax.Expr, result: tuple[int, ...] | None) -> relax.Var | None:
        if result is None or len(result) != 4 or shape_of(row) != (1, 1, 1, result[3]):
            return None
        return reshaped_vector(row, self.bound, result[3], _VIEWS)
