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

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls

_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


# Functions of one tensor that fuse with any loop, and take less time than memory on a GPU.
_CHEAP = ("reshape", "negative", "exp", "sigmoid", "tanh", "erf", "nn.relu", "nn.silu", "nn.gelu")
CHEAP_ON_GPUS = frozenset(f"relax.{name}" for name in _CHEAP)


@dataclass(frozen=True)
class RepeatCasts(RelaxPass):
    """Emit a separate cast for each reader of a cast to a wider floating-point dtype.

    ``functions`` are operators of one tensor that are also repeated, if they read such a cast.
    """

    functions: frozenset[str] = frozenset()

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        light: dict[relax.Var, relax.Call] = {}
        for _, function in mod.functions_items():
            if isinstance(function, relax.Function):
                for block in function.body.blocks:
                    for bound in block.bindings:
                        if _widens(bound.value) or self._is_light(bound.value, light):
                            light[bound.var] = bound.value
        read: set[relax.Var] = set()

        def again(value: relax.Call, builder: relax.BlockBuilder) -> relax.Var:
            arguments = list(value.args)
            if arguments[0] in light:
                arguments[0] = again(light[arguments[0]], builder)
            return builder.emit(
                relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
            )

        def repeated(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            arguments = list(call.args)
            for number, argument in enumerate(arguments):
                value = light.get(argument)
                if value is None:
                    continue
                if argument in read and (_widens(value) or _becomes_loops(call)):
                    arguments[number] = again(value, builder)
                    report.rewrote()
                read.add(argument)
            return relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)

        rewritten = map_calls(mod, repeated) if light else mod
        return rewritten if report.rewrites else mod

    def _is_light(self, value: relax.Expr, light: Mapping[relax.Var, relax.Call]) -> bool:
        name = getattr(getattr(value, "op", None), "name", "")
        return name in self.functions and value.args[0] in light


def _becomes_loops(call: relax.Call) -> bool:
    name: str = getattr(call.op, "name", "")
    return not name.startswith(("relax.call_", "relax.nn.conv", "relax.matmul"))


def _widens(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.astype":
        return False
    before, after = (_BITS.get(dtype_of(x), 0) for x in (value.args[0], value))
    return 0 < before < after
