"""Convolutions go to PyTorch's kernel, which adds the bias too.

Before::

    lv = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
    lv1 = R.reshape(b, (1, 8, 1, 1))
    lv2 = R.add(lv, lv1)

After::

    lv2 = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution.default", ...}', x, w, b)

Requires: nothing; what PyTorch has no kernel for (see ``Convolution.of``) is declined.
Guarantees: no other convolution is left, and the bias of one is added outside only where the bare
result is read too. Runs after: the split (TVM's Gradient does not go through kernels). Runs before:
LegalizeOps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.convolution import Convolution, is_convolution
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions, shape_of

_RESHAPES = ("relax.reshape", "relax.expand_dims")


@dataclass(frozen=True)
class DispatchConvolutions(RelaxPass):
    """Call PyTorch's kernel for convolutions."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            return _ConvolutionMutator(_biases(function), report).visit_expr(function)

        return map_functions(mod, rewrite)


@dataclass(frozen=True)
class _Biased:
    """A convolution, bound to ``bare``, that only an addition of ``bias`` (a vector) reads."""

    bare: relax.Var
    convolution: relax.Call
    bias: relax.Var


def _biases(function: relax.Function) -> dict[relax.Var, _Biased]:
    """The convolutions with a bias, by the variable of the sum."""
    bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    uses: Counter[relax.Var] = Counter()
    for value in [*bound.values(), function.body.body]:
        uses.update(relax.analysis.free_vars(value))
    found = {}
    for var, value in bound.items():
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.add":
            continue
        for bare, row in (value.args, value.args[::-1]):
            call = bound.get(bare) if isinstance(bare, relax.Var) else None
            if not is_convolution(call) or uses[bare] != 1 or Convolution.of(call) is None:
                continue
            bias = _vector(row, bound, shape_of(bare))
            if bias is not None:
                found[var] = _Biased(bare, call, bias)
    return found


def _vector(
    row: relax.Expr, bound: dict[relax.Var, relax.Expr], result: tuple[int, ...] | None
) -> relax.Var | None:
    """The vector with a number for each channel of ``result`` that ``row`` is a reshape of."""
    if result is None or shape_of(row) != (1, result[1], *[1] * (len(result) - 2)):
        return None
    while isinstance(row, relax.Var):
        if shape_of(row) == (result[1],):
            return row
        value = bound.get(row)
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") not in _RESHAPES:
            return None
        row = value.args[0]
    return None


@mutator
class _ConvolutionMutator(PyExprMutator):
    def __init__(self, biased: dict[relax.Var, _Biased], report: PassReport) -> None:
        super().__init__()
        self.biased = biased
        self.bare = {b.bare for b in biased.values()}
        self.report = report

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        # The addition that alone reads the bare result calls the kernel for both.
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
