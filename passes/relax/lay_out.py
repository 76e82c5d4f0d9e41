"""A function returns results, and takes parameters, with their dimensions in another order.

Before, with result 0 and parameter 1 in the order ``(0, 2, 1)``::

    def f(x, y):                                    # y: (2, 3, 4)
        a = R.nn.relu(y)
        return x, a

After::

    def f(x, y):                                    # y: (2, 4, 3)
        lv = R.permute_dims(y, [0, 2, 1])
        a = R.nn.relu(lv)
        lv1 = R.permute_dims(x, [0, 2, 1])
        return lv1, a

The caller permutes them back, by strides, without a copy. So results have the memory layout that
eager PyTorch gives them, and tensors with such a layout are taken without a copy.

Requires: one dataflow block of variable bindings; static shapes. Guarantees: the numbers of results
and parameters, and the names of parameters, stay the same.
Runs after: the split into forward and backward. Runs before: CollapseViews, which joins the
permutations with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    dtype_of,
    flat_results,
    map_functions,
    shape_of,
)


@dataclass(frozen=True)
class Permuted:
    """A result or a parameter whose dimensions are permuted at the boundary of the function.

    - ``number``: its index among the results or the parameters.
    - ``order``: the order of its dimensions outside of the function.
    - ``shape``: its shape before it is permuted. A parameter inside may be a reshape of it.
    """

    number: int
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayOut(RelaxPass):
    """Permute results and parameters of one function.

    Args:
        function: the function's name.
        results: the results that are permuted before they are returned.
        parameters: the parameters that arrive permuted.
    """

    function: str
    results: tuple[Permuted, ...] = ()
    parameters: tuple[Permuted, ...] = ()

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        if not self.results and not self.parameters:
            return mod
        return map_functions(mod, lambda f: self._rewrite(f, report), self.function)

    def _rewrite(self, function: relax.Function, report: PassReport) -> relax.Function:
        for value in (*self.results, *self.parameters):
            if sorted(value.order) != list(range(len(value.shape))):
                raise ValueError(f"{value.order} is no order of the dimensions of {value.shape}")
        arriving = {function.params[p.number]: p for p in self.parameters}
        taken = {v: _parameter(v, p) for v, p in arriving.items()}
        inside = {v: relax.DataflowVar(v.name, v.ty) for v in arriving}
        body = function.bind_params(inside) if inside else function
        others = iter(body.params)
        parameters = [taken[v] if v in taken else next(others) for v in function.params]
        builder = relax.BlockBuilder()
        with builder.function(self.function, parameters, attrs=dict(function.attrs or {})):
            with builder.dataflow():
                for var, permuted in arriving.items():
                    value = builder.emit(_permuted_back(taken[var], permuted))
                    if shape_of(var) != permuted.shape:
                        value = builder.emit(relax.op.reshape(value, shape_of(var)))
                    builder.emit_normalized(relax.VarBinding(inside[var], value))
                for binding in body.body.blocks[0].bindings:
                    if not isinstance(binding.value, relax.Tuple) or binding.var != body.body.body:
                        builder.emit_normalized(binding)
                results = flat_results(body)
                for result in self.results:
                    value = relax.op.permute_dims(results[result.number], list(result.order))
                    results[result.number] = builder.emit(value)
                output = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(output)
        report.rewrote(len(self.results) + len(self.parameters))
        return copy_with_new_vars(builder.get()[self.function])


def _parameter(var: relax.Var, permuted: Permuted) -> relax.Var:
    shape = [permuted.shape[d] for d in permuted.order]
    return relax.Var(var.name, relax.TensorType(shape, dtype_of(var)))


def _permuted_back(var: relax.Var, permuted: Permuted) -> relax.Expr:
    inverse = [permuted.order.index(d) for d in range(len(permuted.order))]
    return relax.op.permute_dims(var, inverse)
