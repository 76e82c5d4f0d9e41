"""The base class of all Relax passes, and functions that rewrite and inspect Relax modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from tvmbridge.core.pass_report import PassReport as PassReport
from tvmbridge.kernels.dtypes import from_relax_dtype


@dataclass(frozen=True)
class RelaxPass:
    """Base of all Relax passes; the fields of a subclass are its options.

    ``pass_(mod)`` returns a new module and leaves ``mod`` untouched.
    """

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        """Return the rewritten module; record rewrites in ``report``. Subclasses implement this."""
        raise NotImplementedError

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        return self.apply(mod, PassReport())


def map_functions(
    mod: tvm.IRModule, rewrite: Callable[[relax.Function], relax.Function], only: str = ""
) -> tvm.IRModule:
    """Return ``mod`` with every Relax function, or the one named ``only``, rewritten.

    If each function stays the same object, return ``mod`` itself.
    """
    functions, changed = {}, False
    for global_var, function in mod.functions_items():
        if isinstance(function, relax.Function) and only in ("", global_var.name_hint):
            rewritten = rewrite(function)
            changed |= not rewritten.same_as(function)
            function = rewritten
        functions[global_var] = function
    if not changed:
        return mod
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def with_functions(mod: tvm.IRModule, rewriter: PyExprMutator) -> tvm.IRModule:
    """Return ``mod`` with every Relax function rewritten by ``rewriter``.

    ``rewriter`` must have been constructed from ``mod``. The result also has the functions that
    ``rewriter`` added.
    """
    for global_var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(global_var, rewriter.visit_expr(function))
    return rewriter.builder_.get()


def map_calls(
    mod: tvm.IRModule,
    rewrite: Callable[[relax.Call, relax.BlockBuilder], relax.Expr],
    report: PassReport | None = None,
) -> tvm.IRModule:
    """Return a new module with every call replaced by ``rewrite(call, builder)``.

    The operands of ``call`` have been rewritten before. ``rewrite`` uses ``builder`` to emit the
    bindings, and to add the functions, that its result needs. New calls get the span of the old
    one. If ``report`` is given and counts no rewrite, return ``mod`` itself.
    """
    rewritten = with_functions(mod, _CallMutator(mod, rewrite))
    return mod if report is not None and not report.rewrites else rewritten


class SpanBuilder:
    """A block builder whose calls get ``span``, unless they have one."""

    def __init__(self, builder: relax.BlockBuilder, span: tvm.ir.Span | None) -> None:
        self.builder = builder
        self.span = span

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        """Bind ``expr`` to a new variable."""
        return self.builder.emit(with_span(expr, self.span), name_hint)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)


def with_span(expr: relax.Expr, span: tvm.ir.Span | None) -> relax.Expr:
    """Return ``expr``; if it is a call without a span, return it with ``span``."""
    if span is None or not isinstance(expr, relax.Call) or expr.span is not None:
        return expr
    return relax.Call(expr.op, expr.args, expr.attrs, expr.ty_args, span)


@mutator
class _CallMutator(PyExprMutator):
    def __init__(
        self, mod: tvm.IRModule, rewrite: Callable[[relax.Call, relax.BlockBuilder], relax.Expr]
    ) -> None:
        super().__init__(mod)
        self.rewrite = rewrite

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.span is None:
            return self.rewrite(super().visit_call_(call), self.builder_)
        builder = SpanBuilder(self.builder_, call.span)
        return with_span(self.rewrite(super().visit_call_(call), builder), call.span)


def free_prefix(prefix: str, names: Iterable[str]) -> str:
    """Return ``prefix``, with underscores in front until none of ``names`` begins with it.

    ``names`` are chosen by the user, so one of them may begin with ``prefix``.
    """
    taken = tuple(names)
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    return prefix


def shape_of(expr: relax.Expr) -> tuple[int, ...] | None:
    """Return the shape of a tensor expression; None if it is no tensor of static shape."""
    type_ = expr.ty
    if not isinstance(type_, relax.TensorType) or type_.shape is None:
        return None
    if not isinstance(type_.shape, relax.ShapeExpr):
        return None
    extents = list(type_.shape.values)
    if not all(isinstance(e, tvm.tirx.IntImm) for e in extents):
        return None
    return tuple([e.value for e in extents])


PERMUTATION = "relax.permute_dims"
RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze")
"""Operators that compile to views of their operand's memory."""


def is_call(expr: relax.Expr | None, name: str) -> TypeGuard[relax.Call]:
    """Whether ``expr`` is a call of the operator ``name``."""
    return isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == name


def permutation(call: relax.Call) -> list[int]:
    """Return the axes of a ``permute_dims``, as numbers from 0 on."""
    rank, axes = call.args[0].ty.ndim, call.attrs.axes
    return [int(axis) % rank for axis in (range(rank)[::-1] if axes is None else axes)]


def transposed_of(
    operand: relax.Expr, lookup: Callable[[relax.Var], relax.Expr | None]
) -> relax.Expr | None:
    """Return the matrix of static shape that ``operand`` is the transpose of, or None."""
    value = lookup(operand) if isinstance(operand, relax.Var) else None
    if not is_call(value, PERMUTATION):
        return None
    shape = shape_of(value.args[0])
    return value.args[0] if shape is not None and len(shape) == 2 else None


def dtype_of(expr: relax.Expr) -> str:
    """Return the dtype of a tensor expression, by name."""
    dtype = expr.ty.dtype
    return str(getattr(dtype, "dtype", dtype))


def tensor_bytes(var: relax.Var) -> int:
    """Return the bytes of a dense tensor with the shape and dtype of ``var``."""
    return math.prod(shape_of(var) or ()) * from_relax_dtype(dtype_of(var)).itemsize


def tensors_held(var: relax.Var) -> list[relax.Var]:
    """Return a variable for each tensor that ``var`` is or holds."""
    types = var.ty.fields if isinstance(var.ty, relax.TupleType) else [var.ty]
    return [relax.Var("value", t) for t in types if isinstance(t, relax.TensorType)]


def value_bytes(var: relax.Var) -> int:
    """Return the bytes of all tensors that ``var`` is or holds."""
    return sum(map(tensor_bytes, tensors_held(var)))


def bindings_of(function: relax.Function) -> dict[relax.Var, relax.Expr]:
    """Return the values of a function's variables, in the order of the bindings."""
    return {b.var: b.value for block in function.body.blocks for b in block.bindings}


def readers_of(function: relax.Function) -> Mapping[relax.Var, list[relax.Var | None]]:
    """Return the variables whose values read each variable; None stands for the result."""
    found: dict[relax.Var, list[relax.Var | None]] = defaultdict(list)
    for var, value in [*bindings_of(function).items(), (None, function.body.body)]:
        for read in relax.analysis.free_vars(value):
            found[read].append(var)
    return found


def binding(var: relax.Var, value: relax.Expr) -> relax.VarBinding:
    """Return the binding of ``value``, whose type is inferred, to ``var``."""
    return relax.VarBinding(var, relax.BlockBuilder().normalize(value))


def with_body(
    function: relax.Function, body: relax.Expr, parameters: Sequence[relax.Var] | None = None
) -> relax.Function:
    """Return ``function`` with another body that has its type; ``parameters`` replace its own."""
    parameters = function.params if parameters is None else parameters
    return relax.Function(
        parameters, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def with_bindings(
    function: relax.Function,
    bindings: Sequence[relax.Binding],
    result: relax.Expr | None = None,
    parameters: Sequence[relax.Var] | None = None,
) -> relax.Function:
    """Return ``function`` with new variables and one dataflow block of ``bindings``.

    ``result`` and ``parameters`` replace its own.
    """
    result = function.body.body if result is None else result
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
    parameters = function.params if parameters is None else parameters
    changed = relax.Function(parameters, body, result.ty, function.is_pure, function.attrs)
    return copy_with_new_vars(changed)


def flat_results(function: relax.Function) -> list[relax.Expr]:
    """Return the tensors that a function with one dataflow block returns, in order."""
    result = function.body.body
    bound = bindings_of(function)
    while isinstance(result, relax.Var) and isinstance(bound.get(result), relax.Var | relax.Tuple):
        result = bound[result]
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]


def storage_root(result: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> relax.Var | None:
    """Return the variable whose memory ``result`` has, through views; None for a constant."""
    while isinstance(result, relax.Var):
        value = bound.get(result)
        if isinstance(value, relax.Var | tvm.ir.GenericConst):
            result = value
        elif isinstance(value, relax.Call) and _shares_memory(value):
            result = value.args[0]
        else:
            return result
    return None


def reshaped_vector(
    row: relax.Expr,
    bound: Mapping[relax.Var, relax.Expr],
    extent: int,
    through: tuple[str, ...] = ("relax.reshape", "relax.expand_dims"),
) -> relax.Var | None:
    """Return the vector of ``extent`` numbers that ``row`` is a view of; None if it is none.

    ``through`` are the operators that the views may be.
    """
    while isinstance(row, relax.Var):
        if shape_of(row) == (extent,):
            return row
        value = bound.get(row)
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") not in through:
            return None
        row = value.args[0]
    return None


def _shares_memory(call: relax.Call) -> bool:
    """Whether the call compiles to a view of its first operand.

    A permutation does so if it keeps the order of all dimensions larger than 1.
    """
    name, shape = getattr(call.op, "name", ""), shape_of(call.args[0])
    if name != PERMUTATION or shape is None:
        return name in RESHAPES
    moved = [axis for axis in permutation(call) if shape[axis] > 1]
    return moved == sorted(moved)


def storage_roots(function: relax.Function) -> list[relax.Var | None]:
    """Return :func:`storage_root` of each result of ``function``."""
    bound = bindings_of(function)
    return [storage_root(result, bound) for result in flat_results(function)]


def shared_results(mod: tvm.IRModule, name: str) -> frozenset[int]:
    """Return the numbers of the results that share memory with an argument or an earlier result.

    A result that is a constant counts as shared, too.
    """
    function = mod[name]
    seen = set(function.params)
    shared = set()
    for index, root in enumerate(storage_roots(function)):
        if root in seen or root is None:
            shared.add(index)
        else:
            seen.add(root)
    return frozenset(shared)
