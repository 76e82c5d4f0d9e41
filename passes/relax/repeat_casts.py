"""Repeat each cast to a wider dtype for each of its readers.

Before::

    wide = R.astype(x, "float32")
    a = R.exp(wide)
    b = R.sum(wide, axis=0)

After::

    wide = R.astype(x, "float32")
    a = R.exp(wide)
    wide1 = R.astype(x, "float32")
    b = R.sum(wide1, axis=0)

Readers that are not fused with one another would read the wide tensor from memory, with twice the
bytes of the narrow one. A cast fuses with any loop, so each reader can read the narrow tensor.

Requires: no later pass merges equal expressions.
Guarantees: each cast that widens a floating dtype has one reader.
Runs before: FuseOps.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls

_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


@dataclass(frozen=True)
class RepeatCasts(RelaxPass):
    """Emit a separate cast for each reader of a cast to a wider floating-point dtype."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        casts: dict[relax.Var, relax.Call] = {}
        for _, function in mod.functions_items():
            if isinstance(function, relax.Function):
                bound = [b for block in function.body.blocks for b in block.bindings]
                casts |= {b.var: b.value for b in bound if _widens(b.value)}
        read: set[relax.Var] = set()

        def repeated(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            arguments = list(call.args)
            for number, argument in enumerate(arguments):
                cast = casts.get(argument)
                if cast is None:
                    continue
                if argument in read:
                    arguments[number] = builder.emit(cast)
                    report.rewrote()
                read.add(argument)
            return relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)

        rewritten = map_calls(mod, repeated) if casts else mod
        return rewritten if report.rewrites else mod


def _widens(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.astype":
        return False
    before, after = (_BITS.get(dtype_of(x), 0) for x in (value.args[0], value))
    return 0 < before < after
