"""Calls of kernels pass short keys instead of their specs, the JSON that describes the operator.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.log1p.default", ...}', x)
    gv = R.call_dps_packed("tvmbridge.matmul", ('{"views": [null, null], ...}', lv, w), out_ty=...)

After::

    lv = R.call_pure_packed("tvmbridge.aten", "0", x)
    gv = R.call_dps_packed("tvmbridge.matmul", ("1", lv, w), out_ty=...)

Requires: the called functions are those of ``tvmbridge.kernels``, which look keys up.
Guarantees: no call of such a kernel has a string of more than seven bytes (``kernels/keys.py`` says
why). Runs after: all passes that read specs. Runs before: the lowering to the virtual machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels import KERNELS
from tvmbridge.kernels.keys import key_of, spec_named
from tvmbridge.kernels.sized import SIZED
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    binding,
    bindings_of,
    map_functions,
    with_body,
)

_CALLS = ("relax.call_pure_packed", "relax.call_dps_packed")


@dataclass(frozen=True)
class NameSpecs(RelaxPass):
    """Replace the specs of kernels by their keys.

    Bindings are read one by one: a visitor from Python meets the types of variables too, and the
    type of all residuals makes its time grow with their square.
    """

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda function: _with_keys(function, report))


def specs_by_key(mod: tvm.IRModule) -> dict[str, str]:
    """Return the specs of all kernel calls in ``mod``, by their keys."""
    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    calls = [v for f in functions for v in bindings_of(f).values() if isinstance(v, relax.Call)]
    texts = {a.value for c in calls for a in _arguments(c) if isinstance(a, tvm.ir.StringImm)}
    return {text: spec_named(text) for text in texts}


def _arguments(call: relax.Call) -> list[relax.Expr]:
    """Return the arguments of a kernel call; empty if it calls no kernel of tvmbridge."""
    if getattr(call.op, "name", "") not in _CALLS:
        return []
    callee, *args = call.args
    if not isinstance(callee, relax.ExternFunc):
        return []
    if callee.global_symbol.removesuffix(SIZED) not in KERNELS:
        return []
    return list(args[0].fields if isinstance(args[0], relax.Tuple) else args)


def _with_keys(function: relax.Function, report: PassReport) -> relax.Function:
    """Return ``function`` with keys for specs; the function itself if it has no spec."""
    before = report.rewrites
    blocks = [
        type(block)([_bound(b, report) for b in block.bindings], block.span)
        for block in function.body.blocks
    ]
    if report.rewrites == before:
        return function
    body = relax.SeqExpr(blocks, function.body.body, function.body.span)
    return relax.BlockBuilder().normalize(with_body(function, body))


def _bound(bound: relax.Binding, report: PassReport) -> relax.Binding:
    call, before = bound.value, report.rewrites
    if not isinstance(call, relax.Call):
        return bound
    named = [_named(a, report) for a in _arguments(call)]
    if report.rewrites == before:
        return bound
    callee, *args = call.args
    if isinstance(args[0], relax.Tuple):
        named = [relax.Tuple(named), *args[1:]]
    return binding(
        bound.var, relax.Call(call.op, [callee, *named], call.attrs, call.ty_args, call.span)
    )


def _named(arg: relax.Expr, report: PassReport) -> relax.Expr:
    if not isinstance(arg, tvm.ir.StringImm) or key_of(arg.value) == arg.value:
        return arg
    report.rewrote()
    return tvm.ir.StringImm(key_of(arg.value))
