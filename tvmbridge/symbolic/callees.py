"""Give calls a function of their own where they share one at some of the sample sizes alone.

TVM keeps equal kernels as one function. At a size that equals another number of the code, kernels
may be equal that differ at other sizes: with two heads, a transposition of heads and positions is
its own inverse if there are two positions. The modules for the sample sizes must call functions
alike, to be generalized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tvm
from tvm import relax, tirx

from tvmbridge.passes.base import map_calls


def with_common_callees(mods: Sequence[tvm.IRModule]) -> list[tvm.IRModule]:
    """Return the modules changed so that two calls share a function in all of them or in none.

    Modules with different numbers of calls are returned unchanged; they cannot be generalized.
    """
    callees = [_callees(mod) for mod in mods]
    if len({len(each) for each in callees}) > 1 or all(each == callees[0] for each in callees):
        return list(mods)
    together = list(zip(*callees, strict=True))
    numbers = {names: number for number, names in enumerate(dict.fromkeys(together))}
    names = [f"{each[0]}_{numbers[each]}" for each in together]
    return [_with_callees(mod, names) for mod in mods]


def _relax_functions(mod: tvm.IRModule) -> Iterator[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """Yield the Relax functions in the order of their names."""
    for name, function in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(function, relax.Function):
            yield name, function


def _callee(call: relax.Call) -> tvm.ir.GlobalVar | None:
    """Return the TIR function that ``call`` calls, if it calls one."""
    first = call.args[0] if len(call.args) else None
    return first if isinstance(first, tvm.ir.GlobalVar) else None


def _callees(mod: tvm.IRModule) -> list[str]:
    """Return the names of the TIR functions that each call of ``mod`` calls, in their order."""
    found: list[str] = []

    def note(call: relax.Call, _: relax.BlockBuilder) -> relax.Expr:
        callee = _callee(call)
        if callee is not None:
            found.append(callee.name_hint)
        return call

    for name, function in _relax_functions(mod):
        map_calls(tvm.IRModule({name: function}), note)
    return found


def _with_callees(mod: tvm.IRModule, names: Sequence[str]) -> tvm.IRModule:
    """Return ``mod`` with the functions that it calls under new names, one for each call."""
    left = iter(names)
    made: dict[str, tvm.ir.GlobalVar] = {}
    functions: dict[tvm.ir.GlobalVar, relax.Function | tirx.PrimFunc] = {}

    def renamed(call: relax.Call, _: relax.BlockBuilder) -> relax.Expr:
        callee = _callee(call)
        if callee is None:
            return call
        name = next(left)
        if name not in made:
            function = mod[callee]
            # A GlobalVar carries the type of its function.
            made[name] = relax.BlockBuilder(tvm.IRModule({})).add_func(function, name)
            functions[made[name]] = function
        return relax.Call(
            call.op, [made[name], *call.args[1:]], call.attrs, call.ty_args, call.span
        )

    for name, function in _relax_functions(mod):
        functions[name] = map_calls(tvm.IRModule({name: function}), renamed)[name]
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
