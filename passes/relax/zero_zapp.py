"""Remove additions and subtractions of zero.

Before::

    zeros = R.zeros((768,))
    g = R.add(zeros, dw)

After::

    g = dw

A multiplication by zeros stays: the other operand may hold an infinity or NaN, whose product with
zero is NaN.

-0.0 + 0.0 is 0.0, but without the addition it is -0.0. The two compare equal, but forward may
divide by them. So the pass removes x + 0.0 of floating-point numbers only from gradients, which
depend on a cotangent. It removes x - 0.0 and x + -0.0, which change no number, everywhere.

Requires: nothing. Guarantees: in gradients, no addition or subtraction of zeros whose other operand
has the shape and dtype of the sum. Runs after: OneZapp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, map_functions
from tvmbridge.passes.relax.neutral import NeutralElementMutator
from tvmbridge.passes.relax.stop_gradients import active_variables, is_floating


@dataclass(frozen=True)
class ZeroZapp(RelaxPass):
    """Remove additions and subtractions of zero.

    Args:
        cotangents: names of the parameters that are cotangents.
    """

    cotangents: tuple[str, ...] = ()

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            arriving = [p for p in function.params if p.name in self.cotangents]
            gradients = active_variables(function, arriving)

            def changes(call: relax.Call, number: float) -> bool:
                negative = math.copysign(1.0, number) < 0
                if not is_floating(call) or negative == (call.op.name == "relax.add"):
                    return False
                return not any(argument in gradients for argument in call.args)

            mutator = NeutralElementMutator(0.0, "relax.add", "relax.subtract", report, changes)
            return mutator.visit_expr(function)

        return map_functions(mod, rewrite)
