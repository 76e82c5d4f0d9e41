"""Convolutions become calls of PyTorch's kernel, which adds the bias too.

Before::

    lv = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
    lv1 = R.reshape(b, (1, 8, 1, 1))
    lv2 = R.add(lv, lv1)

After::

    lv2 = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution.default", ...}', x, w, b)

Requires: nothing; convolutions that PyTorch has no kernel for (see ``Convolution.of``) are
declined. Guarantees: no other convolution is left; a bias is added outside of the kernel only if
something else reads the result without it. Runs after: the split into forward and backward (TVM's
Gradient does not go through kernels). Runs before: LegalizeOps.
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
    is_call,
    map_functions,
    readers_of,
    reshaped_vector,
    shape_of,
)


@dataclass(frozen=True)
class DispatchConvolutions(RelaxPass):
    """Replace convolutions, with the additions of their biases, by calls of PyTorch's kernel."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            return _ConvolutionMutator(_biases(function), report).visit_expr(function)

        return map_functions(mod, rewrite)


@dataclass(frozen=True)
class _Biased:
    """A convolution, bound to ``bare``, whose only reader adds the vector ``bias`` to it."""

    bare: relax.Var
    convolution: relax.Call
    bias: relax.Var


def _biases(function: relax.Function) -> dict[relax.Var, _Biased]:
    """Return the convolutions with a bias, by the variable of the sum."""
    bound, readers = bindings_of(function), readers_of(function)
    found = {}
    for var, value in bound.items():
        if not is_call(value, "relax.add"):
            continue
        for bare, row in (value.args, value.args[::-1]):
            call = bound.get(bare) if isinstance(bare, relax.Var) else None
            if not is_convolution(call) or len(readers[bare]) != 1 or Convolution.of(call) is None:
                continue
            bias = _vector(row, bound, shape_of(bare))
            if bias is not None:
                found[var] = _Biased(bare, call, bias)
    return found


def _vector(
    row: relax.Expr, bound: dict[relax.Var, relax.Expr], result: tuple[int, ...] | None
) -> relax.Var | None:
    """Return the vector, one number a channel, that ``row`` is a reshape of; None if it is none.

    ``result`` is the shape of the convolution's result.
    """
    if result is None or shape_of(row) != (1, result[1], *[1] * (len(result) - 2)):
        return None
    return reshaped_vector(row, bound, result[1])


@mutator
class _ConvolutionMutator(PyExprMutator):
    def __init__(self, biased: dict[relax.Var, _Biased], report: PassReport) -> None:
        super().__init__()
        self.biased = biased
        self.bare = {b.bare for b in biased.values()}
        self.report = report

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        # The call for the addition, which is the only reader, computes the convolution too.
        if binding.var in self.bare:
            return
        biased = self.biased.get(binding.var)
        if biased is None:
            super().visit_var_binding_(binding)
            return
        operands = [self.visit_expr(e) for e in (*biased.convolution.args, biased.bias)]
        self.report.rewrote()
        convolution = Convolution.of(biased.convolution)
        assert convolution is not None
        call = self.builder_.normalize(convolution.kernel_call(operands, binding.var.ty))
        self.builder_.emit_normalized(relax.VarBinding(binding.var, call))

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        if not is_convolution(call):
            return call
        convolution = Convolution.of(call)
        if convolution is None:
            self.report.decline(call.op.name, "PyTorch has no such convolution")
            return call
        self.report.rewrote()
        return convolution.kernel_call(list(call.args), call.ty)
