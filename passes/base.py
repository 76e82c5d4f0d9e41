"""What every Relax pass is made of: a frozen dataclass with ``apply``, and a report it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.core.pass_report import PassReport as PassReport


@dataclass(frozen=True)
class RelaxPass:
    """Base of all Relax passes; the fields of a subclass are its options.

    ``pass_(mod)`` returns a new module and leaves ``mod`` untouched.
    """

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        """The rewritten module; subclasses implement it."""
        raise NotImplementedError

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        return self.apply(mod, PassReport())


def map_functions(
    mod: tvm.IRModule, rewrite: Callable[[relax.Function], relax.Function]
) -> tvm.IRModule:
    """A new module with every Relax function of ``mod`` replaced by ``rewrite`` of it."""
    functions = {}
    for global_var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            function = rewrite(function)
        functions[global_var] = function
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def with_functions(mod: tvm.IRModule, rewriter: PyExprMutator) -> tvm.IRModule:
    """``mod``, which ``rewriter`` was made of, with all Relax functions rewritten and its own."""
    for global_var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(global_var, rewriter.visit_expr(function))
    return rewriter.builder_.get()


def map_calls(
    mod: tvm.IRModule, rewrite: Callable[[relax.Call, relax.BlockBuilder], relax.Expr]
) -> tvm.IRModule:
    """A new module with every call replaced by ``rewrite`` of it, whose operands are rewritten.

    The builder is for what ``rewrite`` emits before its result. All of it has the span of the call.
    """
    return map_functions(mod, lambda f: _CallMutator(rewrite).visit_expr(f))


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
    """``expr`` with ``span`` if it is a call without one."""
    if span is None or not isinstance(expr, relax.Call) or expr.span is not None:
        return expr
    return relax.Call(expr.op, expr.args, expr.attrs, expr.ty_args, span)


@mutator
class _CallMutator(PyExprMutator):
    def __init__(self, rewrite: Callable[[relax.Call, relax.BlockBuilder], relax.Expr]) -> None:
        super().__init__()
        self.rewrite = rewrite

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.span is None:
            return self.rewrite(super().visit_call_(call), self.builder_)
        builder = SpanBuilder(self.builder_, call.span)
        return with_span(self.rewrite(super().visit_call_(call), builder), call.span)


def free_prefix(prefix: str, names: Iterable[str]) -> str:
    """``prefix``, behind underscores where one of ``names``, which the user chose, begins so."""
    taken = tuple(names)
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    return prefix


def shape_of(expr: relax.Expr) -> tuple[int, ...] | None:
    """The static shape of a tensor expression; None where it is not a static tensor."""
    type_ = expr.ty
    if not isinstance(type_, relax.TensorType) or type_.shape is None:
        return None
    if not isinstance(type_.shape, relax.ShapeExpr):
        return None
    extents = list(type_.shape.values)
    if not all(isinstance(e, tvm.tirx.IntImm) for e in extents):
        return None
    return tuple([e.value for e in extents])


def dtype_of(expr: relax.Expr) -> str:
    """The dtype name of a tensor expression."""
    dtype = expr.ty.dtype
    return str(getattr(dtype, "dtype", dtype))


def flat_results(function: relax.Function) -> list[relax.Expr]:
    """The tensors that a function with one dataflow block returns, in order."""
    result = function.body.body
    bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    while isinstance(result, relax.Var) and isinstance(bound.get(result), relax.Var | relax.Tuple):
        result = bound[result]
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]


# Compiled to views of the same memory.
_SHARES_MEMORY = ("relax.reshape", "relax.expand_dims", "relax.squeeze")


def storage_root(result: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> relax.Var | None:
    """The variable whose memory ``result`` is, through views; None for a constant."""
    while isinstance(result, relax.Var):
        value = bound.get(result)
        if isinstance(value, relax.Var | tvm.ir.GenericConst):
            result = value
        elif isinstance(value, relax.Call) and _shares_memory(value):
            result = value.args[0]
        else:
            return result
    return None


def _shares_memory(call: relax.Call) -> bool:
    """Whether it compiles to a view, as a permutation does that moves extents of 1 alone."""
    name, shape = getattr(call.op, "name", ""), shape_of(call.args[0])
    if name != "relax.permute_dims" or shape is None:
        return name in _SHARES_MEMORY
    axes = reversed(range(len(shape))) if call.attrs.axes is None else call.attrs.axes
    moved = [a for a in (int(axis) % len(shape) for axis in axes) if shape[a] > 1]
    return moved == sorted(moved)


def storage_roots(function: relax.Function) -> list[relax.Var | None]:
    """:func:`storage_root` of each result of ``function``."""
    bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    return [storage_root(result, bound) for result in flat_results(function)]


def shared_results(mod: tvm.IRModule, name: str) -> frozenset[int]:
    """Results of a function that share memory with an argument or with an earlier result."""
    function = mod[name]
    seen = set(function.params)
    shared = set()
    for index, root in enumerate(storage_roots(function)):
        if root in seen or root is None:
            shared.add(index)
        else:
            seen.add(root)
    return frozenset(shared)
