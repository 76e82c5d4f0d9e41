"""Gradients of ATen calls: what a rule gets, and how its result becomes gradients of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvmbridge.gradients.helpers import Differentiated, constant_like, shape_of
from tvmbridge.kernels.aten_call import (
    ATEN_CALL,
    FIRST_TENSOR,
    call_overload,
    packed_call,
    resolve_overload,
    spec_of,
    tensors_of,
)
from tvmbridge.legalize.aten.arguments import Arguments

Gradients = dict[str, relax.Expr]


@dataclass(frozen=True)
class Pulled:
    """An ATen call whose gradients a rule returns; ``pulled[name]`` is an argument of the operator.

    - ``var``: the variable that the call is bound to.
    - ``cotangent``: the cotangent of the call's first result.
    - ``arguments``: the arguments of the ATen operator by name.
    - ``builder``: emits the bindings of the gradients.
    """

    var: relax.Var
    call: relax.Call
    cotangent: relax.Expr
    arguments: Arguments
    builder: relax.BlockBuilder

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def x(self) -> relax.Expr:
        """The first tensor."""
        return self.call.args[FIRST_TENSOR]

    @property
    def result(self) -> relax.Expr:
        """The first result."""
        return _first(self.builder, self.var)

    def named(self, names: str) -> list[Any]:
        """Return arguments by their names, which are separated by spaces."""
        return [self.arguments[name] for name in names.split()]

    def aten(self, overload: str, like: relax.Expr, *args: Any) -> relax.Expr:
        """Emit an ATen call whose result has the type of ``like``.

        Relax expressions in ``args`` become the tensor operands, all other values constants.
        """
        tensors: list[relax.Expr] = []

        def encoded(value: Any) -> Any:
            if isinstance(value, list):
                return [encoded(v) for v in value]
            if isinstance(value, relax.Expr):
                tensors.append(value)
                return {"tensor": len(tensors) - 1}
            return value

        listed = [encoded(a) for a in args]
        return self.builder.emit(call_overload(overload, listed, tensors, like.ty))

    def zeros(self, like: relax.Expr) -> relax.Expr:
        """Emit zeros with the shape of ``like`` and the cotangent's dtype."""
        number = constant_like(self.cotangent, 0.0)
        return self.builder.emit(relax.op.full(list(shape_of(like)), number, str(number.ty.dtype)))

    def places(self, shape: Sequence[Any], *, compiled: bool) -> relax.Expr:
        """Emit the call again for its second result alone, the places of the first one's elements.

        ``compiled`` says whether the new call becomes loops.
        """
        content = {**spec_of(self.call), "results": [1], "compiled": compiled}
        type_ = relax.TupleType([relax.TensorType(shape, "int64")])
        call = packed_call(ATEN_CALL, json.dumps(content), tensors_of(self.call), type_)
        return self.builder.emit(relax.TupleGetItem(self.builder.emit(call), 0))


# A rule returns gradients by the names of arguments, or that of the first argument alone.
AtenRule = Callable[[Pulled], Gradients | relax.Expr]


def aten_gradients(rule: AtenRule, overload: str, of: Differentiated) -> list[relax.Expr]:
    """Return the gradients of an ATen call's arguments by the rule of its operator.

    Arguments that the rule names no gradient for, such as indices, get none.
    """
    content, tensors = spec_of(of.call), tensors_of(of.call)
    cotangent = _first(of.builder, of.cotangent)
    arguments = Arguments.of(content, tensors)
    found = rule(Pulled(of.var, of.call, cotangent, arguments, of.builder))
    names = [argument.name for argument in resolve_overload(overload)._schema.arguments]
    by_name = found if isinstance(found, dict) else {names[0]: found}
    gradients = [relax.op.grad.no_grad(a) for a in [tensors[0]] * FIRST_TENSOR + tensors]
    for name, encoded in zip(names, content["args"], strict=False):
        if name in by_name:
            gradients[FIRST_TENSOR + encoded["tensor"]] = by_name[name]
    return gradients


def _first(builder: relax.BlockBuilder, results: relax.Var) -> relax.Expr:
    """Return the first of a call's results, or the only one."""
    is_tuple = isinstance(results.ty, relax.TupleType)
    return builder.emit(relax.TupleGetItem(results, 0)) if is_tuple else results
