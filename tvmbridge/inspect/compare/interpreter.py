"""Interpret a Relax function on PyTorch's tensors, binding by binding.

An operator runs as an equal PyTorch function (:mod:`operators`) if there is one. ATen calls and
other registered kernels are called. TVM compiles each remaining operator alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import tvm
import tvm_ffi
from torch.utils.dlpack import from_dlpack
from tvm import relax

from tvmbridge.compiler.build import build
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.compiler.split import build_function
from tvmbridge.inspect.compare.operators import OPERATORS
from tvmbridge.inspect.compare.trace import Trace, tensors_in
from tvmbridge.kernels import register_kernels
from tvmbridge.kernels.aten_call import aten_call_operator
from tvmbridge.kernels.convolution import CONVOLUTIONS, Convolution
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, shape_of
from tvmbridge.schedules.target import host_target

_PACKED = ("relax.call_pure_packed", "relax.call_dps_packed")


class RelaxRun:
    """One run of a Relax function, which the constructor performs.

    - ``values``: the value of each variable: a tensor, or a list of values for a tuple.
    - ``trace``: all computed tensors in order.
    - ``results``: the results of the function.

    Args:
        masks: the masks of dropout operators in the function, in program order.
        trace: the trace to extend, which may have the arguments already; None: a new trace.
    """

    def __init__(
        self,
        function: relax.Function,
        arguments: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor] = (),
        trace: Trace | None = None,
    ) -> None:
        register_kernels()
        self.trace = trace or Trace()
        self._masks: Iterator[torch.Tensor] = iter(masks)
        self.values: dict[relax.Var, Any] = dict(zip(function.params, arguments, strict=True))
        for value in arguments:
            if self.trace.number(value) is None:
                self.trace.add(value)
        with torch.no_grad():
            for block in function.body.blocks:
                for binding in block.bindings:
                    self._bind(binding.var, binding.value)
        self.results = tensors_in(self._value(function.body.body))

    def _bind(self, var: relax.Var, expr: relax.Expr) -> None:
        if not isinstance(expr, relax.Call):
            self.values[var] = self._value(expr)
            return
        operands = [self._value(a) for a in expr.args]
        self.values[var] = self._call(var, expr, operands)
        for value in tensors_in(self.values[var]):
            self.trace.add(value, operator_of(expr), tensors_in(operands))

    def _value(self, expr: Any) -> Any:
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return [self._value(f) for f in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(expr, tvm.ir.GenericConst):
            value = from_dlpack(expr.value).clone()
            self.trace.add(value)
            return value
        if isinstance(expr, relax.ShapeExpr):
            return [int(extent) for extent in expr.values]
        if isinstance(expr, tvm.tirx.IntImm | tvm.tirx.FloatImm | tvm.ir.StringImm):
            return expr.value
        if isinstance(expr, relax.ExternFunc):
            return str(expr.global_symbol)
        raise NotImplementedError(f"a {type(expr).__name__} in a Relax function")

    def _call(self, var: relax.Var, call: relax.Call, operands: list[Any]) -> Any:
        name = str(getattr(call.op, "name", call.op))
        if name == "relax.nn.dropout":
            kept = next(self._masks).to(operands[0].dtype)
            return [operands[0] * (kept * (1.0 / (1.0 - float(call.attrs.rate)))), kept]
        convolution = Convolution.of(call) if name in CONVOLUTIONS else None
        if convolution is not None:
            call = convolution.kernel_call(list(call.args), call.ty)
            name, operands = call.op.name, [self._value(a) for a in call.args]
        if name in _PACKED:
            return _call_kernel(call, operands, into=name == "relax.call_dps_packed")
        if name in OPERATORS:
            with suppress(NotImplementedError):
                return _checked(call, OPERATORS[name](call, *operands))
        return run_alone(var, call, self.values)


def calls_of(function: relax.Function) -> list[tuple[relax.Var, relax.Call]]:
    """Return the calls of a function in order, each with the variable that it is bound to."""
    bindings = [b for block in function.body.blocks for b in block.bindings]
    return [(b.var, b.value) for b in bindings if isinstance(b.value, relax.Call)]


def operator_of(call: relax.Call) -> str:
    """Return the name of the operator or kernel that a call runs."""
    overload = aten_call_operator(call)
    if overload is not None:
        return overload
    name = str(getattr(call.op, "name", call.op))
    return str(call.args[0].global_symbol) if name in _PACKED else name


def _checked(call: relax.Call, value: Any) -> Any:
    """Return ``value`` if it has the shapes and dtypes of the call's Relax type."""
    types = call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty]
    for item, type_ in zip(value if isinstance(value, list) else [value], types, strict=True):
        dtype = from_relax_dtype(str(getattr(type_.dtype, "dtype", type_.dtype)))
        shape = tuple(int(s) for s in type_.shape.values)
        if (item.dtype, tuple(item.shape)) != (dtype, shape):
            raise NotImplementedError(f"{call.op} made {item.dtype} {tuple(item.shape)}")
    return value


def _call_kernel(call: relax.Call, operands: list[Any], *, into: bool) -> Any:
    """Run a registered kernel; with ``into`` it writes into a result allocated here."""
    kernel = tvm_ffi.get_global_func(operands[0])
    arguments = operands[1] if into else operands[1:]
    dense = [o.contiguous() if isinstance(o, torch.Tensor) else o for o in arguments]
    if into:
        result = torch.empty(shape_of(call) or (), dtype=from_relax_dtype(dtype_of(call)))
        kernel(*dense, result)
        return result
    returned = kernel(*dense)
    if isinstance(call.ty, relax.TupleType):
        return [from_dlpack(r).clone() for r in returned]
    return from_dlpack(returned).clone()


# Operators compiled alone, by the structural hash of their module; they are few and small.
_LOADED: dict[int, LoadedModule] = {}


def run_alone(
    var: relax.Var,
    call: relax.Call,
    values: Mapping[relax.Var, torch.Tensor],
    loaded: dict[int, LoadedModule] = _LOADED,
) -> Any:
    """Compile one operator alone, and run it on the values of its operands.

    ``loaded`` caches the compiled operators.
    """
    operands = list(relax.analysis.free_vars(call))
    fields = len(var.ty.fields) if isinstance(var.ty, relax.TupleType) else None
    results = [var] if fields is None else [relax.TupleGetItem(var, i) for i in range(fields)]
    function = build_function("forward", operands, [relax.VarBinding(var, call)], results)
    mod = tvm.IRModule({"forward": function})
    key = tvm_ffi.structural_hash(mod)
    if key not in loaded:
        built = build(mod, host_target(), [])
        loaded[key] = LoadedModule(built.machine, built.unaligned)
    found = loaded[key].run("forward", [values[operand] for operand in operands])
    return found[0] if fields is None else found
