"""The gradient of a convolution's data gets a call of its own, beside those of weight and bias.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution_backward.default", ...}',
                            dy, x, w)
    dx = lv[0]
    dw = lv[1]

After, with a mask in each spec::

    lv1 = R.call_pure_packed("tvmbridge.aten", '{... [true, false, false] ...}', dy, x, w)
    lv2 = R.call_pure_packed("tvmbridge.aten", '{... [false, true, false] ...}', dy, x, w)
    dx = lv1[0]
    dw = lv2[0]

PyTorch's kernel computes the two separately as well, but weight and bias together. With two calls
the gradients of weights can run later than those of inputs.

Requires: one dataflow block. Guarantees: the same results. Runs before: ``color_backward``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import (
    ATEN_CALL,
    aten_call_operator,
    packed_call,
    spec_of,
    tensors_of,
)
from tvmbridge.passes.base import PassReport, RelaxPass, binding, map_functions, with_bindings

_OPERATOR = "aten.convolution_backward.default"


class SeparateConvolutionGradients(RelaxPass):
    """Compute the gradients of a convolution's data, and of its weight and bias, in two calls."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda function: _separated(function, report))


def _separated(function: relax.Function, report: PassReport) -> relax.Function:
    (block,) = function.body.blocks
    whole = set(relax.analysis.free_vars(function.body.body))
    for bound in block.bindings:
        if not isinstance(bound.value, relax.TupleGetItem):
            whole |= set(relax.analysis.free_vars(bound.value))
    # The item that replaces each item of a call, by the variable of the call.
    items: dict[relax.Var, list[relax.Expr]] = {}
    bindings: list[relax.Binding] = []
    for bound in block.bindings:
        var, value = bound.var, bound.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in items:
            bindings.append(binding(var, items[value.tuple_value][value.index]))
        elif var not in whole and _has_both(value):
            items[var] = []
            for positions in _groups(value):
                call = relax.DataflowVar(var.name, _type_of(value, positions))
                bindings.append(binding(call, _call_for(value, positions)))
                items[var] += [relax.TupleGetItem(call, i) for i in range(len(positions))]
            report.rewrote()
        else:
            bindings.append(bound)
    return with_bindings(function, bindings) if items else function


def _has_both(value: relax.Expr) -> bool:
    """Whether ``value`` computes the gradient of the data, which comes first, and another one."""
    if not isinstance(value, relax.Call) or aten_call_operator(value) != _OPERATOR:
        return False
    results = spec_of(value)["results"]
    return results is not None and len(results) > 1 and results[0] == 0


def _groups(call: relax.Call) -> tuple[list[int], list[int]]:
    results: list[int] = spec_of(call)["results"]
    return results[:1], results[1:]


def _type_of(call: relax.Call, positions: Sequence[int]) -> relax.TupleType:
    fields = dict(zip(spec_of(call)["results"], call.ty_args[0].fields, strict=True))
    return relax.TupleType([fields[position] for position in positions])


def _call_for(call: relax.Call, positions: Sequence[int]) -> relax.Call:
    content = spec_of(call)
    content["args"][-1] = [number in positions for number in range(3)]
    content["results"] = list(positions)
    return packed_call(ATEN_CALL, json.dumps(content), tensors_of(call), _type_of(call, positions))
