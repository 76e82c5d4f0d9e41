"""Gradient rules of ATen calls that move elements by indices, sort, scan or raise to powers.

The rules are PyTorch's own formulas, and emit ATen calls to move elements.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.gradients.helpers import constant_like, fit_shape, shape_of
from tvmbridge.gradients.pulled import AtenRule, Gradients, Pulled
from tvmbridge.kernels.aten_call import (
    aten_call_operator,
    spec_of,
    tensors_of,
)
from tvmbridge.legalize.aten.arguments import Arguments

op = relax.op


def _gather(pull: Pulled) -> Gradients:
    x = pull["self"]
    # A range whose length is a size would become a constant of one sample's size.
    if not sizes_vary() and _takes_one(x, pull["dim"], pull["index"]):
        return {"self": _where_taken(pull)}
    places = [pull.zeros(x), pull["dim"], pull["index"], pull.cotangent]
    return {"self": pull.aten("aten.scatter_add.default", x, *places)}


def _takes_one(x: relax.Expr, dim: int, index: relax.Expr) -> bool:
    """Whether ``index`` takes exactly one element of each row along ``dim``, as a loss does."""
    taken = list(shape_of(x))
    if not taken:
        return False
    taken[dim] = 1
    return list(shape_of(index)) == taken


def _where_taken(pull: Pulled) -> relax.Expr:
    """Return the cotangents at the places that ``index`` takes, and zeros elsewhere.

    This fuses. A scatter does not, and needs zeros in memory, for a loss as many as logits.
    """
    emit, index = pull.builder.emit, pull["index"]
    extents = list(shape_of(pull["self"]))
    rest = [1] * len(extents)
    rest[pull["dim"]] = count = extents[pull["dim"]]
    places = emit(op.reshape(emit(op.arange(count, dtype=str(index.ty.dtype))), rest))
    taken = emit(op.equal(places, index))
    return op.where(taken, pull.cotangent, constant_like(pull.cotangent, 0.0))


def _index_select(pull: Pulled) -> Gradients:
    x = pull["self"]
    places = [pull.zeros(x), pull["dim"], pull["index"], pull.cotangent]
    return {"self": pull.aten("aten.index_add.default", x, *places)}


def _index(pull: Pulled) -> Gradients:
    x = pull["self"]
    written = [pull.zeros(x), pull["indices"], pull.cotangent, True]
    return {"self": pull.aten("aten.index_put.default", x, *written)}


def _scatter(pull: Pulled) -> Gradients:
    x, grad, where = pull["self"], pull.cotangent, (pull["dim"], pull["index"])
    found = {"self": pull.aten("aten.scatter.value", x, grad, *where, 0)}
    if "src" in pull.arguments.values:
        found["src"] = pull.aten("aten.gather.default", pull["src"], grad, *where)
    return found


def _scatter_add(pull: Pulled) -> Gradients:
    taken = [pull.cotangent, pull["dim"], pull["index"]]
    return {"self": pull.cotangent, "src": pull.aten("aten.gather.default", pull["src"], *taken)}


def _index_put(pull: Pulled) -> Gradients:
    x, values, indices = pull["self"], pull["values"], pull["indices"]
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    kept = [n for axis, n in enumerate(shape_of(x)) if axis not in axes]
    start = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    # The shape of x[indices].
    extents = [*kept[:start], *shape_of(indices[axes[0]]), *kept[start:]]
    like = relax.Var("taken", relax.TensorType(extents, str(x.ty.dtype)))
    taken = pull.aten("aten.index.Tensor", like, pull.cotangent, list(indices))
    zeros = pull.zeros(values)
    grad = pull.cotangent
    if not pull["accumulate"]:
        grad = pull.aten("aten.index_put.default", x, grad, list(indices), zeros, False)
    return {"self": grad, "values": fit_shape(pull.builder, taken, values)}


def _cumsum(pull: Pulled) -> Gradients:
    x = pull["self"]
    dim = pull["dim"] % len(shape_of(x))
    turned = pull.builder.emit(op.flip(pull.cotangent, dim))
    summed = pull.aten("aten.cumsum.default", x, turned, dim)
    return {"self": op.flip(summed, dim)}


def _ordered(pull: Pulled) -> Gradients:
    """Scatter the cotangents of sorted elements to the elements' positions before sorting."""
    x = pull["self"]
    places = pull.places(list(shape_of(pull.cotangent)), compiled=False)
    written = [pull.zeros(x), pull["dim"], places, pull.cotangent]
    return {"self": pull.aten("aten.scatter.src", x, *written)}


def _operand(pull: Pulled, name: str) -> relax.Expr:
    """Return an operand of a power as an expression: a number becomes a constant."""
    value = pull[name]
    return value if isinstance(value, relax.Expr) else constant_like(pull.cotangent, float(value))


def _power(pull: Pulled) -> Gradients:
    """Return the gradients of ``b ** e`` for the base and the exponent, with PyTorch's exceptions.

    The derivative by the base is e b^(e-1), but 0 if e is 0. The derivative by the exponent is
    b^e log b, but 0 if b is 0 and e is not negative.
    """
    emit, grad = pull.builder.emit, pull.cotangent
    base, exponent = _operand(pull, "self"), _operand(pull, "exponent")
    zero, one = constant_like(grad, 0.0), constant_like(grad, 1.0)
    found = {}
    if isinstance(pull["self"], relax.Expr):
        less = emit(op.subtract(exponent, one))
        # A number stays a number, because PyTorch's kernel has short forms for some numbers.
        fixed = pull["exponent"]
        overload = "Tensor_Scalar" if isinstance(fixed, int | float) else "Tensor_Tensor"
        # PyTorch subtracts in double precision, not in the dtype of the result.
        power = float(fixed) - 1.0 if isinstance(fixed, int | float) else less
        lower = pull.aten(f"aten.pow.{overload}", pull.result, base, power)
        slope = op.multiply(grad, op.multiply(exponent, lower))
        found["self"] = op.where(op.equal(exponent, zero), zero, slope)
    if isinstance(pull["exponent"], relax.Expr):
        slope = op.multiply(pull.result, op.log(base))
        flat = op.logical_and(op.equal(base, zero), op.greater_equal(exponent, zero))
        found["exponent"] = op.multiply(grad, op.where(flat, zero, slope))
    return {name: fit_shape(pull.builder, g, pull[name]) for name, g in found.items()}


MOVE_RULES: dict[str, AtenRule] = {
    "aten.gather.default": _gather,
    "aten.index_select.default": _index_select,
    "aten.index.Tensor": _index,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_add.default": _scatter_add,
    "aten.index_put.default": _index_put,
    "aten.cumsum.default": _cumsum,
    "aten.sort.default": _ordered,
    "aten.sort.stable": _ordered,
    "aten.topk.default": _ordered,
    "aten.pow.Tensor_Tensor": _power,
    "aten.pow.Tensor_Scalar": _power,
    "aten.pow.Scalar": _power,
}


def can_move_back(call: relax.Call) -> bool:
    """Whether the rule of an ATen call applies: one floating-point dtype, and no empty tensor.

    Some operators have further conditions, on dtypes or shapes.
    """
    content, tensors = spec_of(call), tensors_of(call)
    arguments = Arguments.of(content, list(tensors))
    dtypes = {str(t.ty.dtype) for t in tensors if "float" in str(t.ty.dtype)}
    result = call.ty
    if isinstance(result, relax.TupleType):
        if content["results"] != [0]:
            return False
        result = result.fields[0]
    if dtypes != {str(result.dtype)} or any(0 in shape_of(t) for t in tensors):
        return False
    overload = str(aten_call_operator(call))
    if overload.startswith("aten.pow."):
        return all("float" in str(t.ty.dtype) for t in tensors)
    if overload == "aten.cumsum.default":
        return bool(shape_of(arguments["self"]))
    if overload in ("aten.scatter_add.default", "aten.scatter.src"):
        return shape_of(arguments["src"]) == shape_of(arguments["index"])
    if overload == "aten.index_put.default":
        # With indices of one shape, the elements that they select have this shape too.
        return len({shape_of(i) for i in arguments["indices"] if i is not None}) == 1
    return True
