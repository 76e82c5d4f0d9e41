"""A Relax function, binding by binding, on PyTorch's tensors: all its values.

Each operator is evaluated by its meaning in PyTorch (:mod:`operators`), ATen calls and other
registered kernels by calling them, and what is left by TVM, compiled alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import tvm
import tvm_ffi
from torch.utils.dlpack import from_dlpack
from tvm import relax

from tvmbridge.compiler.build import build
from tvmbridge.inspect.compare.operators import OPERATORS
from tvmbridge.inspect.compare.trace import Step, TraceBuilder, tensors_in
from tvmbridge.kernels import register_kernels
from tvmbridge.kernels.aten_call import aten_call_operator
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, shape_of
from tvmbridge.schedules.target import host_target


class Evaluation:
    """One run of a Relax function; after it ``trace`` has its values and ``results`` its result.

    Args:
        function: a function of dataflow blocks, without control flow.
        arguments: one tensor for each parameter.
        masks: what the dropouts that still stand in the function keep, in program order.
        trace: where the values are added; values that are there already keep their numbers.
        numbers: the steps of the arguments, by parameter; those missing are added as inputs.
    """

    def __init__(
        self,
        function: relax.Function,
        arguments: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor] = (),
        trace: TraceBuilder | None = None,
        numbers: Mapping[int, int] | None = None,
    ) -> None:
        register_kernels()
        self.arguments = list(arguments)
        self.trace = trace or TraceBuilder()
        self._masks: Iterator[torch.Tensor] = iter(masks)
        self._values: dict[relax.Var, Any] = {}
        self._numbers: dict[relax.Var, Any] = {}
        if len(function.params) != len(arguments):
            raise ValueError(f"{len(function.params)} parameters, {len(arguments)} arguments")
        given = dict(numbers or {})
        for i, (parameter, value) in enumerate(zip(function.params, arguments, strict=True)):
            self._values[parameter] = value
            number = given[i] if i in given else self.trace.given(parameter.name, value)
            self._numbers[parameter] = number
        with torch.no_grad():
            for block in function.body.blocks:
                for binding in block.bindings:
                    self._bind(binding.var, binding.value)
        self.results: Any = self._value(function.body.body)
        self.result_numbers: Any = self._number(function.body.body)

    def _bind(self, var: relax.Var, expr: relax.Expr) -> None:
        value = self._value(expr)
        self._values[var] = value
        if not isinstance(expr, relax.Call):
            self._numbers[var] = self._number(expr)
            return
        operands = tensors_numbered([self._number(a) for a in expr.args])
        name = operator_of(expr)

        def add(item: torch.Tensor) -> int:
            return self.trace.computed(var.name, name, "", operands, item)

        self._numbers[var] = [add(v) for v in value] if isinstance(value, list) else add(value)

    def step(self, var: relax.Var) -> Step:
        """The step of a variable that holds one tensor."""
        return self.trace.steps[self._numbers[var]]

    def _number(self, expr: relax.Expr) -> Any:
        """The step of an expression, or a list of steps for a tuple."""
        if isinstance(expr, relax.Var):
            return self._numbers[expr]
        if isinstance(expr, relax.Tuple):
            return [self._number(f) for f in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self._number(expr.tuple_value)[expr.index]
        if isinstance(expr, tvm.ir.GenericConst):
            return self.trace.given("a constant", self._value(expr))
        return []

    def _value(self, expr: Any) -> Any:
        if isinstance(expr, relax.Var):
            return self._values[expr]
        if isinstance(expr, relax.Tuple):
            return [self._value(f) for f in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(expr, tvm.ir.GenericConst):
            return torch_constant(expr)
        if isinstance(expr, relax.ShapeExpr):
            return [int(extent) for extent in expr.values]
        if isinstance(expr, tvm.tirx.IntImm):
            return int(expr.value)
        if isinstance(expr, tvm.tirx.FloatImm):
            return float(expr.value)
        if isinstance(expr, tvm.ir.StringImm):
            return expr.value
        if isinstance(expr, relax.ExternFunc):
            return str(expr.global_symbol)
        if isinstance(expr, relax.Call):
            return self._call(expr)
        raise NotImplementedError(f"a {type(expr).__name__} in a Relax function")

    def _call(self, call: relax.Call) -> Any:
        name = str(getattr(call.op, "name", call.op))
        operands = [self._value(a) for a in call.args]
        if name == "relax.nn.dropout":
            return _dropout(operands[0], float(call.attrs.rate), next(self._masks))
        if name == "relax.call_pure_packed":
            return _call_kernel(call, operands[0], operands[1:])
        if name == "relax.call_dps_packed":
            return _call_kernel(call, operands[0], operands[1], into=True)
        meaning = OPERATORS.get(name)
        if meaning is not None:
            try:
                return _checked(call, meaning(call, operands))
            except NotImplementedError:
                pass
        return _by_tvm(call, operands)


def tensors_numbered(numbers: Any) -> list[int]:
    """The numbers in nested lists of numbers."""
    if isinstance(numbers, int):
        return [numbers]
    return [n for item in numbers for n in tensors_numbered(item)]


def operator_of(call: relax.Call) -> str:
    """The name of the operator or kernel that a call runs."""
    overload = aten_call_operator(call)
    if overload is not None:
        return overload
    name = str(getattr(call.op, "name", call.op))
    if name in ("relax.call_pure_packed", "relax.call_dps_packed"):
        return str(call.args[0].global_symbol)
    return name


def torch_constant(constant: tvm.ir.GenericConst) -> torch.Tensor:
    """The values of a Relax constant."""
    return from_dlpack(constant.value).clone()


def _dropout(x: torch.Tensor, rate: float, mask: torch.Tensor) -> list[torch.Tensor]:
    kept = mask.to(x.dtype)
    return [x * (kept * (1.0 / (1.0 - rate))), kept]


def _checked(call: relax.Call, value: Any) -> Any:
    """``value``, unless it is not of the type that Relax gives the call."""
    types = call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty]
    for item, type_ in zip(value if isinstance(value, list) else [value], types, strict=True):
        dtype = from_relax_dtype(str(getattr(type_.dtype, "dtype", type_.dtype)))
        shape = tuple(int(s) for s in type_.shape.values)
        if (item.dtype, tuple(item.shape)) != (dtype, shape):
            raise NotImplementedError(f"{call.op} made {item.dtype} {tuple(item.shape)}")
    return value


def _call_kernel(call: relax.Call, kernel: str, operands: list[Any], into: bool = False) -> Any:
    """Run a registered kernel; ``into`` a result that is allocated for it."""
    function = tvm_ffi.get_global_func(kernel)
    dense = [o.contiguous() if isinstance(o, torch.Tensor) else o for o in operands]
    if into:
        shape = shape_of(call)
        assert shape is not None
        result = torch.empty(shape, dtype=from_relax_dtype(dtype_of(call)))
        function(*dense, result)
        return result
    returned = function(*dense)
    if isinstance(call.ty, relax.TupleType):
        return [from_dlpack(r).clone() for r in returned]
    return from_dlpack(returned).clone()


# Operators compiled alone, by what they are; they are few, and small.
_MACHINES: dict[int, relax.VirtualMachine] = {}


def _by_tvm(call: relax.Call, operands: list[Any]) -> Any:
    """One operator, compiled alone."""
    mod = _alone(call)
    key = tvm_ffi.structural_hash(mod)
    if key not in _MACHINES:
        _MACHINES[key] = build(mod, host_target(), []).machine
    dense = [t.clone(memory_format=torch.contiguous_format) for t in tensors_in(operands)]
    returned = _MACHINES[key]["main"](*dense)
    if isinstance(call.ty, relax.TupleType):
        return [from_dlpack(r).clone() for r in returned]
    return from_dlpack(returned).clone()


def _alone(call: relax.Call) -> tvm.IRModule:
    """A module whose ``main`` makes this call of its parameters."""
    parameters: list[relax.Var] = []

    def parameter(expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple) and isinstance(expr.ty, relax.TupleType):
            return relax.Tuple([parameter(f) for f in expr.fields])
        if not isinstance(expr.ty, relax.TensorType):
            return expr
        parameters.append(relax.Var(f"x{len(parameters)}", expr.ty))
        return parameters[-1]

    arguments = [parameter(a) for a in call.args]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(call.op, arguments, call.attrs, call.ty_args))
        builder.emit_func_output(result)
    return builder.get()
