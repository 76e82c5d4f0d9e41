"""Convolution weights absorb the factor per channel that their result is multiplied by.

Before (``w``, ``b``, ``scale`` and ``shift`` are known before any call)::

    lv = R.nn.conv2d(x, w) + R.reshape(b, (1, 8, 1, 1))
    lv1 = lv * R.reshape(scale, (8, 1, 1))
    y = lv1 + R.reshape(shift, (8, 1, 1))

After::

    lv = R.nn.conv2d(x, w * R.reshape(scale, (8, 1, 1, 1)))
    y = lv + R.reshape(b * scale + shift, (1, 8, 1, 1))

Batch norm by moving statistics has this form after ``LowerBatchNorm(fold=True)``.

Requires: names of parameters whose values do not change. Guarantees: no such factor follows a
convolution, unless something else reads the result without the factor. Results differ by rounding.
Runs after: LowerBatchNorm. Runs before: LiftFrozen, DispatchConvolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.convolution import Convolution, is_convolution
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
    with_span,
)
from tvmbridge.passes.relax.lift_frozen import weights_alone

op = relax.op


@dataclass(frozen=True)
class FoldBatchNorm(RelaxPass):
    """Multiply the weights of convolutions by the factors of their results.

    Args:
        frozen: names of the function's parameters whose values do not change.
    """

    frozen: tuple[str, ...]

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            found = _Finder(function, self.frozen, report).found()
            return _FoldMutator(found, report).visit_expr(function) if found else function

        return map_functions(mod, rewrite)


@dataclass(frozen=True)
class _Scaled:
    """The value ``(convolution + bias) * scale + shift``; bias or shift is None if not added."""

    convolution: relax.Call
    bias: relax.Var | None
    scale: relax.Var
    shift: relax.Var | None


class _Finder:
    def __init__(
        self, function: relax.Function, frozen: tuple[str, ...], report: PassReport
    ) -> None:
        self.bound = bindings_of(function)
        self.known = weights_alone(function, frozen)
        self.report = report
        self.readers = readers_of(function)

    def found(self) -> dict[relax.Var, _Scaled]:
        """Return the scaled convolutions by the variable of the last product or sum."""
        found = {}
        for var in self.bound:
            scaled = self._at(var)
            if scaled is not None:
                found[self._shifted(var) if scaled.shift is not None else var] = scaled
        return found

    def _at(self, var: relax.Var) -> _Scaled | None:
        """Return the scaled convolution that the product ``var`` ends; None if there is none."""
        operand, scale = self._with_row(var, "relax.multiply")
        if operand is None or scale is None:
            return None
        convolution, bias = self._convolution(operand)
        if convolution is None:
            return None
        name = convolution.op.name
        form = Convolution.of(convolution)
        if form is None or form.transposed:
            self.report.decline(name, "its weight does not have the result's channels first")
        elif convolution.args[1] not in self.known:
            self.report.decline(name, "its weight is computed at each call")
        elif {dtype_of(e) for e in (*convolution.args, scale)} != {dtype_of(convolution)}:
            self.report.decline(name, "the factor has another dtype")
        else:
            shifted = self._shifted(var)
            shift = None if shifted is None else self._with_row(shifted, "relax.add")[1]
            return _Scaled(convolution, bias, scale, shift)
        return None

    def _shifted(self, var: relax.Var) -> relax.Var | None:
        """Return the variable of the sum of ``var`` and a vector, if nothing else reads ``var``."""
        reader = self.readers[var][0] if len(self.readers[var]) == 1 else None
        if reader is None or self._with_row(reader, "relax.add")[0] is None:
            return None
        return reader

    def _with_row(self, var: relax.Var, name: str) -> tuple[relax.Var | None, relax.Var | None]:
        """Return the operands of ``var``'s value, a call of ``name``: a tensor and a vector.

        The vector has one number for each channel, and depends on weights alone. Both are None if
        the value of ``var`` is no such call.
        """
        value = self.bound.get(var)
        if not is_call(value, name):
            return None, None
        for operand, row in (value.args, value.args[::-1]):
            if isinstance(operand, relax.Var) and operand not in self.known:
                vector = self._vector(row, shape_of(operand))
                if vector is not None and shape_of(operand) == shape_of(var):
                    return operand, vector
        return None, None

    def _vector(self, row: relax.Expr, result: tuple[int, ...] | None) -> relax.Var | None:
        shape = shape_of(row)
        if result is None or len(result) < 3 or shape is None or row not in self.known:
            return None
        if (1,) * (len(result) - len(shape)) + shape != (1, result[1], *[1] * (len(result) - 2)):
            return None
        return reshaped_vector(row, self.bound, result[1])

    def _convolution(self, var: relax.Var) -> tuple[relax.Call | None, relax.Var | None]:
        """Return the convolution that ``var`` is, with or without a bias, and the bias.

        Both are None if ``var`` is no convolution, or has several readers.
        """
        if len(self.readers[var]) != 1:
            return None, None
        value = self.bound.get(var)
        if is_convolution(value):
            return value, None
        bare, bias = self._with_row(var, "relax.add")
        if bare is None or len(self.readers[bare]) != 1 or not is_convolution(self.bound.get(bare)):
            return None, None
        return self.bound[bare], bias


@mutator
class _FoldMutator(PyExprMutator):
    def __init__(self, found: dict[relax.Var, _Scaled], report: PassReport) -> None:
        super().__init__()
        self.found = found
        self.report = report

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        scaled = self.found.get(binding.var)
        if scaled is None:
            super().visit_var_binding_(binding)
            return
        self.report.rewrote()
        value = self.builder_.normalize(with_span(self._folded(scaled), binding.value.span))
        self.builder_.emit_normalized(relax.VarBinding(binding.var, value))

    def _folded(self, scaled: _Scaled) -> relax.Expr:
        emit = self.builder_.emit
        data, weight = (self.visit_expr(a) for a in scaled.convolution.args)
        scale = self.visit_expr(scaled.scale)
        rank, channels = len(shape_of(weight) or ()), (shape_of(scale) or ())[0]
        factor = emit(op.reshape(scale, [channels, *[1] * (rank - 1)]))
        call = scaled.convolution
        product = emit(op.multiply(weight, factor))
        folded = relax.Call(call.op, [data, product], call.attrs, call.ty_args, call.span)
        summand = None
        if scaled.bias is not None:
            summand = emit(op.multiply(self.visit_expr(scaled.bias), scale))
        if scaled.shift is not None:
            shift = self.visit_expr(scaled.shift)
            summand = shift if summand is None else emit(op.add(summand, shift))
        if summand is None:
            return folded
        row = emit(op.reshape(summand, [1, channels, *[1] * (rank - 2)]))
        return op.add(emit(folded), row)
