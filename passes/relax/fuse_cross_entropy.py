"""A cross entropy and its gradient read the logits and two numbers of each row.

Before::

    lv = R.nn.log_softmax(x)                          # x: (8192, 50257)
    lv1 = aten.nll_loss_forward(lv, target)           # the mean, and the number of targets
    g = aten.nll_loss_backward(ct, lv, target, lv1[1])
    s = R.sum(g, axis=[1], keepdims=True)
    grad = R.subtract(g, R.multiply(R.exp(lv), s))

After::

    m = R.max(x, axis=[1], keepdims=True)
    t = R.log(R.sum(R.exp(x - m), axis=[1], keepdims=True))
    valid = R.not_equal(target, -100)
    picked = aten.gather(x, 1, R.where(valid, target, 0))
    count = R.sum(valid)
    loss = R.sum(R.where(valid, -((picked - m) - t), 0)) / count
    s = R.where(valid, -ct / count, 0)
    g = R.where(R.equal(R.arange(50257), target), s, 0)
    grad = R.subtract(g, R.multiply(R.exp((x - m) - t), s))

The kernels of ``nll_loss`` read and write tensors as large as the logits, in float32, which forward
would keep for backward. The rest is functions of single elements, which backward computes again.

Under autocast PyTorch rounds the logarithms to half precision, and the kernels read them cast back.
The casts are functions of single elements too, which backward computes again as well.

Requires: targets are classes, without weights of the classes. ``gather`` checks them on the device,
as ``nll_loss`` does. Guarantees: logarithms are computed by the formula of PyTorch's log_softmax.
Runs before: the joint function is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import aten_call_operator, call_overload, spec_of, tensors_of
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    dtype_of,
    is_call,
    map_functions,
    shape_of,
)

_FORWARD, _BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
_MEAN, _SUM = 1, 2
_WIDE = ("float32", "float64")


@dataclass(frozen=True)
class FuseCrossEntropy(RelaxPass):
    """Compute cross entropies and their gradients from the logits, element by element."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            bound = bindings_of(function)
            losses = _losses(bound)
            return _LossMutator(losses, bound, report).visit_expr(function) if losses else function

        rewritten = map_functions(mod, rewrite)
        return rewritten if report.rewrites else mod


@dataclass(frozen=True)
class _Loss:
    """A negative log-likelihood: its log-softmax, targets, and the arguments of ``nll_loss``.

    - ``casts``: the log-softmax, followed by the casts that lead to the argument of ``nll_loss``.
    """

    casts: tuple[relax.Var, ...]
    target: relax.Expr
    reduction: int
    ignored: int

    @property
    def source(self) -> relax.Var:
        """The log-softmax."""
        return self.casts[0]


def _losses(bound: dict[relax.Var, relax.Expr]) -> dict[relax.Var, _Loss]:
    """Return the calls of ``nll_loss`` and of its backward that can be rewritten, by variable."""
    found = {}
    for var, call in bound.items():
        name = aten_call_operator(call) if isinstance(call, relax.Call) else None
        if name in (_FORWARD, _BACKWARD):
            arguments = _arguments(call)
            *_, logarithms, target, weight, reduction, ignored = (
                arguments if name == _FORWARD else arguments[:-1]
            )
            casts = _casts_of_log_softmax(logarithms, bound)
            if weight is None and reduction in (_MEAN, _SUM) and casts:
                found[var] = _Loss(casts, target, reduction, ignored)
    # A kernel that is left would still need the tensor that the others no longer do.
    left = {
        argument
        for var, call in bound.items()
        if isinstance(call, relax.Call) and var not in found and aten_call_operator(call)
        for argument in call.args
    }
    return {var: loss for var, loss in found.items() if left.isdisjoint(loss.casts)}


def _arguments(call: relax.Call) -> list[Any]:
    tensors = tensors_of(call)
    return [tensors[a["tensor"]] if isinstance(a, dict) else a for a in spec_of(call)["args"]]


def _casts_of_log_softmax(
    expr: relax.Expr, bound: dict[relax.Var, relax.Expr]
) -> tuple[relax.Var, ...]:
    """Return the log-softmax that ``expr`` is a cast of, and all casts; empty if it is none."""
    casts = [expr]
    while is_call(bound.get(casts[-1]), "relax.astype"):
        casts.append(bound[casts[-1]].args[0])
    if not _is_log_softmax(casts[-1], bound) or dtype_of(expr) not in _WIDE:
        return ()
    return tuple(reversed(casts))


def _is_log_softmax(expr: relax.Expr, bound: dict[relax.Var, relax.Expr]) -> bool:
    value = bound.get(expr)
    if not is_call(value, "relax.nn.log_softmax"):
        return False
    shape = shape_of(value)
    return (
        shape is not None
        and len(shape) == 2
        and int(value.attrs.axis) in (-1, 1)
        and dtype_of(value) in _WIDE
    )


@mutator
class _LossMutator(PyExprMutator):
    """Replaces the calls of ``losses``.

    - ``parts``: for a log-softmax, its operand, the rows' maxima, and the logarithms of their sums.
    - ``sums``: for a gradient of ``nll_loss``, and for a cast of one, the sums of its rows.
    """

    def __init__(
        self,
        losses: dict[relax.Var, _Loss],
        bound: dict[relax.Var, relax.Expr],
        report: PassReport,
    ) -> None:
        super().__init__()
        self.losses, self.bound, self.report = losses, bound, report
        self.rewritten = {loss.source for loss in losses.values()}
        self.parts: dict[relax.Var, tuple[relax.Expr, relax.Expr, relax.Expr]] = {}
        self.sums: dict[relax.Var, relax.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        loss = self.losses.get(var)
        if var in self.rewritten:
            self._bind(var, self._log_softmax(var, value.args[0]))
        elif loss is not None and aten_call_operator(value) == _FORWARD:
            self.report.rewrote()
            self._bind(var, self._forward(loss, spec_of(value)["results"]))
        elif loss is not None:
            self.report.rewrote()
            cotangent, *_, count = _arguments(value)
            self._bind(var, self._backward(var, loss, cotangent, count))
        elif self._is_sum_of_rows(value):
            self._bind(var, op.reshape(self.sums[value.args[0]], shape_of(var)))
        else:
            super().visit_var_binding_(binding)
            if is_call(value, "relax.astype") and value.args[0] in self.sums:
                # All but one element of a row are 0, so that no sum is rounded.
                total = op.astype(self.sums[value.args[0]], dtype_of(var))
                self.sums[var] = self.builder_.emit(total)

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        self.builder_.emit_normalized(relax.VarBinding(var, self.builder_.normalize(value)))

    def _log_softmax(self, var: relax.Var, operand: relax.Expr) -> relax.Expr:
        emit, x = self.builder_.emit, self.visit_expr(operand)
        top = emit(op.max(x, [1], True))
        powers = emit(op.exp(emit(op.subtract(x, top))))
        logs = emit(op.log(emit(op.sum(powers, [1], True))))
        self.parts[var] = operand, top, logs
        return op.subtract(emit(op.subtract(x, top)), logs)

    def _forward(self, loss: _Loss, results: list[int]) -> relax.Expr:
        emit = self.builder_.emit
        operand, top, logs = self.parts[loss.source]
        dtype, (rows, _) = dtype_of(operand), _matrix(operand)
        valid, target = self._valid(loss)
        safe = emit(op.where(valid, target, relax.const(0, dtype_of(target))))
        index = emit(op.reshape(safe, [rows, 1]))
        logits = self._narrow(operand)
        arguments = [{"tensor": 0}, 1, {"tensor": 1}]
        type_ = relax.TensorType([rows, 1], dtype_of(logits))
        picked = emit(call_overload("aten.gather.default", arguments, [logits, index], type_))
        picked = emit(op.astype(picked, dtype))
        logarithm = emit(op.subtract(emit(op.subtract(picked, top)), logs))
        for cast in loss.casts[1:]:
            dtype = dtype_of(cast)
            logarithm = emit(op.astype(logarithm, dtype))
        lost = emit(op.negative(emit(op.reshape(logarithm, [rows]))))
        total = emit(op.sum(emit(op.where(valid, lost, relax.const(0, dtype)))))
        count = emit(op.sum(emit(op.astype(valid, dtype))))
        mean = emit(op.divide(total, count)) if loss.reduction == _MEAN else total
        fields = mean, count
        return relax.Tuple([fields[i] for i in results])

    def _backward(
        self, var: relax.Var, loss: _Loss, cotangent: relax.Expr, count: relax.Expr
    ) -> relax.Expr:
        emit = self.builder_.emit
        (rows, columns), dtype = _matrix(var), dtype_of(var)
        valid, target = self._valid(loss)
        share = emit(op.negative(self.visit_expr(cotangent)))
        if loss.reduction == _MEAN:
            share = emit(op.divide(share, self.visit_expr(count)))
        share = emit(op.where(valid, share, relax.const(0, dtype)))
        self.sums[var] = emit(op.reshape(share, [rows, 1]))
        classes = emit(op.reshape(emit(op.arange(columns, dtype=dtype_of(target))), [1, columns]))
        chosen = emit(op.equal(classes, emit(op.reshape(target, [rows, 1]))))
        return op.where(chosen, self.sums[var], relax.const(0, dtype))

    def _valid(self, loss: _Loss) -> tuple[relax.Expr, relax.Expr]:
        """Return which targets count, and the targets."""
        target = self.visit_expr(loss.target)
        ignored = relax.const(loss.ignored, dtype_of(target))
        return self.builder_.emit(op.not_equal(target, ignored)), target

    def _narrow(self, operand: relax.Expr) -> relax.Expr:
        """Return the logits before reshapes and exact casts, in the shape of ``operand``."""
        found, value = operand, self.bound.get(operand)
        while is_call(value, "relax.reshape") or _is_exact_cast(value):
            found = value.args[0]
            value = self.bound.get(found)
        return self.builder_.emit(op.reshape(self.visit_expr(found), shape_of(operand)))

    def _is_sum_of_rows(self, value: relax.Expr) -> bool:
        if not is_call(value, "relax.sum"):
            return False
        axes = value.attrs.axis
        return value.args[0] in self.sums and axes is not None and list(axes) in ([1], [-1])


def _is_exact_cast(cast: relax.Expr | None) -> TypeGuard[relax.Call]:
    """Whether ``cast`` is one to a dtype that has each value of its operand's floating dtype."""
    if not is_call(cast, "relax.astype"):
        return False
    source, result = (getattr(torch, dtype_of(expr)) for expr in (cast.args[0], cast))
    return source.is_floating_point and torch.promote_types(source, result) is result


def _matrix(expr: relax.Expr) -> tuple[int, int]:
    """Return rows and columns of a matrix."""
    rows, columns = shape_of(expr) or (0, 0)
    return rows, columns
