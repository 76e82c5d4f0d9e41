"""Remove the parameters of absent cotangents, and the gradients that depend on them alone.

Before, with ``b`` absent::

    def backward(x, a, b):
        lv = R.multiply(b, x)
        lv1 = R.add(a, lv)

After::

    def backward(x, a):
        zeros = R.zeros((4,))
        lv1 = R.add(a, zeros)

A cotangent is absent if no gradient arrives for its output; PyTorch's autograd then skips the
operators that lead to it. Computing with a zero cotangent differs from that: zero times an infinite
derivative is NaN. So a value that depends on absent cotangents, and on no other cotangent, becomes
zeros, whatever else it depends on.

Requires: one dataflow block of variable bindings, gradients linear in the cotangents, static
shapes. Guarantees: no parameter is an absent cotangent. Runs before: ZeroZapp, which removes the
additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import zeros_call
from tvmbridge.kernels.borders import function_entered
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    binding,
    dtype_of,
    map_functions,
    shape_of,
    with_bindings,
)


@dataclass(frozen=True)
class DropCotangents(RelaxPass):
    """Remove the parameters of absent cotangents; replace values that need only them by zeros.

    Args:
        cotangents: names of the parameters that are cotangents; if several parameters have the
            same name, the last of them.
        absent: names of the cotangents that do not arrive.
        called: numbers of the custom autograd functions whose backward is called although no
            cotangent arrives. Zeros that enter them are created when backward runs, so that no
            pass simplifies a computation with them: these functions need not be linear.
        device: PyTorch's name of the device of such zeros.
    """

    cotangents: tuple[str, ...]
    absent: tuple[str, ...]
    called: frozenset[int] = frozenset()
    device: str = "cpu"

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda function: self._rewrite(function, report))

    def _rewrite(self, function: relax.Function, report: PassReport) -> relax.Function:
        named = {p.name: p for p in function.params}
        absent = [named[name] for name in self.absent if name in named]
        if not absent:
            return function
        fresh = {p: relax.DataflowVar(p.name, p.ty) for p in absent}
        function = function.bind_params(fresh)
        arriving = [named[name] for name in self.cotangents if name in named]
        flow = _Flow({fresh.get(p, p) for p in arriving}, set(fresh.values()))
        bindings = [b for zeros in fresh.values() for b in _zeros(zeros)]
        for block in function.body.blocks:
            for bound in block.bindings:
                if function_entered(bound.value) in self.called:
                    flow.dependent.add(bound.var)
                    if flow.reads_zeros(bound.value):
                        report.rewrote()
                        bindings += _zeros(bound.var, self.device)
                        continue
                elif flow.visit(bound):
                    report.rewrote()
                    bindings += _zeros(bound.var)
                    continue
                if flow.reads_zeros(bound.value):
                    report.decline(bound.var.name, "it reads a cotangent that arrives")
                bindings.append(bound)
        return with_bindings(function, bindings)


class _Flow:
    """Tracks which variables depend on a cotangent.

    - ``dependent``: variables that depend on a cotangent.
    - ``zero``: variables that depend on absent cotangents alone, and are replaced by zeros.
    """

    def __init__(self, cotangents: set[relax.Var], absent: set[relax.Var]) -> None:
        self.dependent = cotangents
        self.zero = absent
        self._fields: dict[relax.Var, list[relax.Expr]] = {}

    def visit(self, bound: relax.Binding) -> bool:
        """Visit the next binding in order; return whether its value is zero."""
        var, value = bound.var, bound.value
        reads = [v for v in relax.analysis.free_vars(value) if v in self.dependent]
        if not reads:
            return False
        self.dependent.add(var)
        if self._is_zero(value, reads):
            self.zero.add(var)
        elif isinstance(value, relax.Tuple):
            self._fields[var] = list(value.fields)
        return var in self.zero

    def _is_zero(self, value: relax.Expr, reads: list[relax.Var]) -> bool:
        if isinstance(value, relax.Tuple):
            return all(field in self.zero for field in value.fields)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._fields:
            return self._fields[value.tuple_value][value.index] in self.zero
        return all(v in self.zero for v in reads)

    def reads_zeros(self, value: relax.Expr) -> bool:
        """Whether ``value`` reads something that is zero."""
        return any(v in self.zero for v in relax.analysis.free_vars(value))


def _zeros(var: relax.Var, opaque_on: str = "") -> list[relax.Binding]:
    """Return bindings that set ``var``, a tensor or a tuple of tensors, to zeros of its type.

    If ``opaque_on`` names a device, an ATen call creates the zeros, so that no pass knows that the
    result is zero.
    """
    if not isinstance(var.ty, relax.TupleType):
        shape = shape_of(var)
        if shape is None:
            raise ValueError(f"{var.name} is no tensor of static shape")
        dtype = dtype_of(var)
        zeros = zeros_call(shape, dtype, opaque_on) if opaque_on else relax.op.zeros(shape, dtype)
        return [binding(var, zeros)]
    fields = [relax.DataflowVar(f"{var.name}_{i}", t) for i, t in enumerate(var.ty.fields)]
    return [*(b for f in fields for b in _zeros(f)), binding(var, relax.Tuple(fields))]
