"""Gradient rules of ATen calls for pooling and upsampling, by PyTorch's own backward operators.

A rule applies to a call with one tensor operand and one result; indices may be a second result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvmbridge.gradients.helpers import shape_of
from tvmbridge.kernels.aten_call import (
    ATEN_CALL,
    FIRST_TENSOR,
    aten_call_operator,
    call_overload,
    packed_call,
    spec_of,
    tensors_of,
)
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.windows import finds_places

_WITH_INDICES = [0, 1]


@dataclass(frozen=True)
class _Pulled:
    """The input of a rule: an ATen call, and the cotangent of its first result.

    - ``var``: the variable that the call is bound to.
    - ``result``: the type of the first result.
    - ``arguments``: the arguments of the ATen operator by name.
    - ``builder``: emits the bindings of the gradient.
    """

    var: relax.Var
    call: relax.Call
    result: relax.TensorType
    cotangent: relax.Expr
    arguments: Arguments
    builder: relax.BlockBuilder

    @property
    def x(self) -> relax.Expr:
        return self.call.args[FIRST_TENSOR]

    def back(self, overload: str, tensors: list[relax.Expr], *rest: Any) -> relax.Expr:
        """Return a call of a backward operator on the cotangent, ``tensors`` and ``rest``."""
        operands = [self.cotangent, *tensors]
        args = [*({"tensor": i} for i in range(len(operands))), *rest]
        return call_overload(overload, args, operands, self.x.ty)

    def named(self, names: str) -> list[Any]:
        """Return the call's arguments by their names, which are separated by spaces."""
        return [self.arguments[name] for name in names.split()]


AtenRule = Callable[[_Pulled], relax.Expr]


def _average(rank: int) -> AtenRule:
    names = "kernel_size stride padding ceil_mode count_include_pad divisor_override"
    overload = f"aten.avg_pool{rank}d_backward.default"
    return lambda pulled: pulled.back(overload, [pulled.x], *pulled.named(names))


def _adaptive_average(rank: int) -> AtenRule:
    overload = f"aten._adaptive_avg_pool{rank}d_backward.default"
    return lambda pulled: pulled.back(overload, [pulled.x])


def _indices(pulled: _Pulled) -> relax.Expr:
    """Return the indices of the maxima that a max pooling chose.

    The indices are the second result of the call if the call returns them. Otherwise backward runs
    the pooling again for its indices alone.
    """
    spec = spec_of(pulled.call)
    content = {**spec, "results": [1], "compiled": finds_places(spec)}
    if spec["results"] == _WITH_INDICES:
        return pulled.builder.emit(relax.TupleGetItem(pulled.var, 1))
    type_ = relax.TensorType(pulled.result.shape, "int64")
    tensors = tensors_of(pulled.call)
    call = packed_call(ATEN_CALL, json.dumps(content), tensors, relax.TupleType([type_]))
    return pulled.builder.emit(relax.TupleGetItem(pulled.builder.emit(call), 0))


def _largest(rank: int) -> AtenRule:
    """Return the rule of max pooling: the cotangent goes to the maximum, to the first of equals."""
    overload = f"aten.max_pool{rank}d_with_indices_backward.default"

    def rule(pulled: _Pulled) -> relax.Expr:
        rest = pulled.named("kernel_size stride padding dilation ceil_mode")
        operands = [pulled.cotangent, pulled.x, _indices(pulled)]
        args = [{"tensor": 0}, {"tensor": 1}, *rest, {"tensor": 2}]
        return call_overload(overload, args, operands, pulled.x.ty)

    return rule


def _adaptive_largest(rank: int) -> AtenRule:
    overload = f"aten.adaptive_max_pool{rank}d_backward.default"
    return lambda pulled: pulled.back(overload, [pulled.x, _indices(pulled)])


def _upsample(kind: str, rank: int) -> AtenRule:
    overload = f"aten.upsample_{kind}{rank}d_backward.default"

    def rule(pulled: _Pulled) -> relax.Expr:
        sizes = [[int(n) for n in pulled.result.shape.values][2:], list(shape_of(pulled.x))]
        corners = [] if kind == "nearest" else pulled.named("align_corners")
        factors = pulled.arguments["scale_factors"] or [None] * rank
        return pulled.back(overload, [], *sizes, *corners, *factors)

    return rule


ATEN_RULES: dict[str, AtenRule] = {
    **{f"aten.avg_pool{n}d.default": _average(n) for n in (2, 3)},
    **{f"aten._adaptive_avg_pool{n}d.default": _adaptive_average(n) for n in (2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": _largest(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": _adaptive_largest(n) for n in (2, 3)},
    **{
        f"aten.upsample_{kind}{n}d.vec": _upsample(kind, n)
        for kind, n in (
            ("nearest", 2),
            ("linear", 1),
            ("bilinear", 2),
            ("trilinear", 3),
            ("bicubic", 2),
        )
    },
}


def is_pulled_back(call: relax.Call) -> bool:
    """Whether the rule of an ATen call applies: one tensor operand, and one result or indices."""
    tensors = tensors_of(call)
    return spec_of(call)["results"] in (None, [0], _WITH_INDICES) and len(tensors) == 1


def aten_rule(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradients of an ATen call's arguments by the operator's rule in ``ATEN_RULES``."""
    result, pulled = var.ty, cotangent
    if isinstance(result, relax.TupleType):
        result, pulled = result.fields[0], builder.emit(relax.TupleGetItem(cotangent, 0))
    content, tensors = spec_of(call), tensors_of(call)
    arguments = Arguments.of(content, tensors)
    rule = ATEN_RULES[str(aten_call_operator(call))]
    gradient = rule(_Pulled(var, call, result, pulled, arguments, builder))
    return [*(relax.op.grad.no_grad(tensors[0]) for _ in range(FIRST_TENSOR)), gradient]
