"""Forward returns its residuals as one tuple, and backward takes them as one parameter.

Before, with two results of which the second is a residual, parameter 1 of backward::

    def forward(x):                     def backward(x, r, ct):
        ...                                 lv = R.multiply(r, ct)
        gv = (y, r)
        return gv

After::

    def forward(x):                     def backward(x, residuals, ct):
        ...                                 r = tuple_getitem(residuals, 0)
        residuals = (r,)                    _ = empty_residuals(residuals)
        results = (y, residuals)            lv = R.multiply(r, ct)
        return results

The caller passes one object from forward to backward, so no tensor in it is converted between TVM
and PyTorch. If the caller allows it (``kernels/allocation.py``), ``empty_residuals`` drops what the
object holds. Each residual is then freed after its last use in backward, and not at its end. The
parameter has no type and its items are read by calls: TVM's virtual machine checks a tuple's items
at each call, and would hold them until backward ends.

Requires: one dataflow block; forward returns a tuple. Guarantees: the other results and parameters
keep their order. Runs after: all passes that refer to results or parameters by number. Runs before:
the lowering to the virtual machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.allocation import EMPTY_RESIDUALS
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    binding,
    flat_results,
    map_functions,
    with_bindings,
)

_NAME = "residuals"
_NOTHING = relax.TupleType([])


@dataclass(frozen=True)
class BundleResiduals(RelaxPass):
    """Bundle the residuals as one result of ``forward`` and one parameter of ``backward``.

    Args:
        num_outputs: the number of results of ``forward`` that come before the residuals.
        first: the index of the first parameter of ``backward`` that is a residual.
        count: the number of residuals.
    """

    num_outputs: int
    first: int
    count: int

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        mod = map_functions(mod, lambda f: self._returning(f, report), "forward")
        return map_functions(mod, lambda f: self._taking(f, report), "backward")

    def residuals_of(self, backward: relax.Function) -> Sequence[relax.Var]:
        """Return the parameters of ``backward`` that are residuals, before the pass has run."""
        return list(backward.params[self.first : self.first + self.count])

    def _returning(self, function: relax.Function, report: PassReport) -> relax.Function:
        if _is_bundle(function.ret_ty.fields[-1]):
            return function
        report.rewrote()
        fields = flat_results(function)
        outputs, kept = fields[: self.num_outputs], fields[self.num_outputs :]
        residuals = relax.DataflowVar(_NAME, _tuple_type(kept))
        results = relax.Var("results", _tuple_type([*outputs, residuals]))
        bindings = [
            *(b for b in _bindings(function) if b.var != function.body.body),
            binding(residuals, relax.Tuple(kept)),
            binding(results, relax.Tuple([*outputs, residuals])),
        ]
        return with_bindings(function, bindings, results)

    def _taking(self, function: relax.Function, report: PassReport) -> relax.Function:
        if any(isinstance(p.ty, relax.AnyType) for p in function.params):
            return function
        report.rewrote()
        taken = self.residuals_of(function)
        residuals = relax.Var(_NAME, relax.AnyType())
        fields = [relax.DataflowVar(p.name, p.ty) for p in taken]
        inside = function.bind_params(dict(zip(taken, fields, strict=True)))
        others = list(inside.params)
        parameters = [*others[: self.first], residuals, *others[self.first :]]
        bindings = [
            *(binding(f, _item(residuals, i, f.ty)) for i, f in enumerate(fields)),
            binding(relax.DataflowVar("_", _NOTHING), _emptied(residuals)),
        ]
        return with_bindings(inside, [*bindings, *_bindings(inside)], parameters=parameters)


def _item(residuals: relax.Var, number: int, type_: relax.Type) -> relax.Call:
    """Return the call that reads an item, whose type the virtual machine does not check."""
    getitem = relax.ExternFunc("vm.builtin.tuple_getitem")
    return relax.op.call_pure_packed(getitem, residuals, relax.prim_value(number), ty_args=[type_])


def _emptied(residuals: relax.Var) -> relax.Call:
    empty = relax.ExternFunc(EMPTY_RESIDUALS)
    return relax.op.call_pure_packed(empty, residuals, ty_args=[_NOTHING])


def _bindings(function: relax.Function) -> list[relax.Binding]:
    (block,) = function.body.blocks
    return list(block.bindings)


def _is_bundle(type_: relax.Type) -> bool:
    return isinstance(type_, relax.TupleType)


def _tuple_type(fields: Sequence[relax.Expr]) -> relax.TupleType:
    return relax.TupleType([field.ty for field in fields])
