"""Make symbols parameters: integers of TIR functions, one shape parameter of Relax functions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmbridge.kernels.sized import SIZED
from tvmbridge.passes.base import map_calls
from tvmbridge.schedules.reader import mentions
from tvmbridge.symbolic.specs import MARK

# The result of these operators is not negative if both operands are not.
_OF_BOTH = (
    *(tirx.Add, tirx.Mul, tirx.Min, tirx.Max),
    *(tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod),
)
_PACKED = ("relax.call_pure_packed", "relax.call_dps_packed")


def attach_sizes(mod: tvm.IRModule, count: int, prefix: str) -> tvm.IRModule:
    """Return ``mod`` with the symbols as parameters of its functions.

    Args:
        mod: a module whose symbols are free variables, named ``prefix`` and a number.
    """
    names = [f"{prefix}{i}" for i in range(count)]
    functions: dict[Any, Any] = {}
    taken: dict[str, tuple[tvm.ir.GlobalVar, list[str]]] = {}
    inputs = _inputs_of_loops(mod)
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function):
            functions[name] = _taking_shape(function, names)
            continue
        found = _named(function, names)
        if found:
            # A GlobalVar carries the type of its function, so the new type needs a new one.
            function = _with_plain_divisions(_without_vector_divisions(function), found.values())
            function = _taking_numbers(
                function, list(found.values()), inputs.get(name.name_hint, len(function.params))
            )
            name = _name_of(function, name.name_hint)
            taken[name.name_hint] = name, list(found)
        functions[name] = function
    whole = tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
    return _passing_symbols(whole, taken)


def _name_of(function: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
    """Return a GlobalVar for ``function`` with the function's type."""
    return relax.BlockBuilder(tvm.IRModule({})).add_func(function, name)


def _named(function: Any, names: list[str]) -> dict[str, tirx.Var]:
    found: dict[str, tirx.Var] = {}

    def look(var: tirx.Var) -> None:
        if var.name in names:
            found[var.name] = var

    tvm_ffi.structural_walk(function, (tirx.Var, look))
    return {name: found[name] for name in names if name in found}


def _inputs_of_loops(mod: tvm.IRModule) -> dict[str, int]:
    """Return the number of arguments in calls of each TIR function, without the results."""
    counts: dict[str, int] = {}

    def look(call: relax.Call) -> None:
        if getattr(call.op, "name", "") == "relax.call_tir":
            counts[call.args[0].name_hint] = len(call.args[1].fields)

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            tvm_ffi.structural_walk(function, (relax.Call, look))
    return counts


def _without_vector_divisions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``function`` with serial loops in place of vector loops that divide lanes by sizes.

    No processor divides vectors of integers, and LLVM takes long to compile such a division.
    """

    def plain(loop: tirx.For) -> tirx.For:
        vectors = loop.kind == tirx.ForKind.VECTORIZED
        if not vectors or not _divides_by_size(loop.body, loop.loop_var):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    body = tvm_ffi.structural_map(function.body, (tirx.For, plain))
    return function.with_body(body)


def _divides_by_size(body: tirx.Stmt, lane: tirx.Var) -> bool:
    found: list[bool] = []

    def look(division: Any) -> None:
        if not isinstance(division.b, tirx.IntImm) and mentions(division.a, lane):
            found.append(True)

    tvm_ffi.structural_walk(body, ((tirx.FloorDiv, tirx.FloorMod), look))
    return bool(found)


def _with_plain_divisions(function: tirx.PrimFunc, symbols: Iterable[tirx.Var]) -> tirx.PrimFunc:
    """Return ``function`` with truncating divisions wherever no operand can be negative.

    TVM rounds a quotient down by an expression with several copies of the dividend, unless it can
    prove the sign. Nested divisions by sizes multiply the copies, and LLVM then takes minutes.
    """
    known, loops = set(symbols), list[tirx.For]()
    tvm_ffi.structural_walk(function.body, (tirx.For, loops.append))
    for _ in loops:  # a loop's start may depend on outer loops, which may come later in the list
        known |= {loop.loop_var for loop in loops if _never_negative(loop.min, known)}

    def divided(division: Any) -> Any:
        if not all(_never_negative(side, known) for side in (division.a, division.b)):
            return division
        plain = tirx.Div if isinstance(division, tirx.FloorDiv) else tirx.Mod
        return plain(division.a, division.b)

    body = tvm_ffi.structural_map(function.body, ((tirx.FloorDiv, tirx.FloorMod), divided))
    return function.with_body(body)


def _never_negative(expr: Any, known: Container[Any]) -> bool:
    if isinstance(expr, tirx.IntImm):
        return int(expr) >= 0
    if isinstance(expr, tirx.Var):
        return expr in known
    if isinstance(expr, _OF_BOTH):
        return _never_negative(expr.a, known) and _never_negative(expr.b, known)
    return False


def _taking_numbers(function: tirx.PrimFunc, symbols: list[tirx.Var], inputs: int) -> tirx.PrimFunc:
    """Return ``function`` with the symbols as parameters between ``inputs`` inputs and results."""
    given = list(function.params)
    params = [*given[:inputs], *symbols, *given[inputs:]]
    return tirx.PrimFunc(params, function.body, function.ret_type, function.attrs)


def _taking_shape(function: relax.Function, names: list[str]) -> relax.Function:
    """Return ``function`` with one more parameter, the last: the shape of all symbols."""
    found = _named(function, names)
    symbols = [found[n] if n in found else tirx.Var(n, "int64") for n in names]
    sizes = relax.Var("sizes", relax.ShapeType(symbols))
    params = [*function.params, sizes]
    return relax.Function(params, function.body, function.ret_ty, function.is_pure, function.attrs)


def _passing_symbols(
    mod: tvm.IRModule, taken: Mapping[str, tuple[tvm.ir.GlobalVar, list[str]]]
) -> tvm.IRModule:
    functions = dict(mod.functions_items())
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function):
            symbols = {v.name: v for v in function.params[-1].ty.values}
            alone = tvm.IRModule({name: function})
            rewritten = map_calls(alone, lambda call, _, s=symbols: _passing(call, taken, s))  # type: ignore[misc]
            functions[name] = rewritten[name]
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _passing(
    call: relax.Call,
    taken: Mapping[str, tuple[tvm.ir.GlobalVar, list[str]]],
    symbols: Mapping[str, tirx.Var],
) -> relax.Expr:
    kind = getattr(call.op, "name", "")
    if kind == "relax.call_tir":
        if call.args[0].name_hint not in taken:
            return call
        name, names = taken[call.args[0].name_hint]
        given = relax.Tuple([*call.args[1].fields, *(symbols[n] for n in names)])
        return relax.Call(call.op, [name, given], call.attrs, call.ty_args)
    if kind not in _PACKED:
        return call
    callee, *args = call.args
    in_tuple = isinstance(args[0], relax.Tuple)
    given = list(args[0].fields) if in_tuple else list(args)
    if not given or not isinstance(given[0], tvm.ir.StringImm):
        return call
    if not given[0].value.startswith(MARK):
        return call
    spec = tvm.ir.StringImm(given[0].value.removeprefix(MARK))
    sized = [spec, relax.ShapeExpr(list(symbols.values())), *given[1:]]
    named = relax.ExternFunc(callee.global_symbol + SIZED)
    args = [relax.Tuple(sized), *args[1:]] if in_tuple else sized
    return relax.Call(call.op, [named, *args], call.attrs, call.ty_args)
