"""Legalization of powers with a constant exponent, such as 2, by products, quotients and roots."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.ir import Call, Expr, GenericConst
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

# Exponents of relax.power that become products, quotients and roots, as in PyTorch's kernels.
SHORT_EXPONENTS = (2.0, 3.0, -1.0, -2.0, -0.5)


def exponent_of(call: Call) -> float | None:
    """Return the constant exponent of a ``relax.power``; None if the exponent is a tensor."""
    exponent = call.args[1]
    if not isinstance(exponent, GenericConst) or exponent.value.shape:
        return None
    return float(exponent.value.numpy().item())


def power(legalizations: Mapping[str, LegalizeFunc], others: LegalizeFunc) -> LegalizeFunc:
    """Return the legalization of ``relax.power``.

    Args:
        others: the legalization for exponents that are not in ``SHORT_EXPONENTS``.
    """

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        x, exponent = call.args[0], exponent_of(call)

        def call_of(name: str, *operands: Expr) -> Expr:
            plain = bb.normalize(getattr(relax.op, name)(*operands))
            return legalizations[f"relax.{name}"](bb, plain)

        one = relax.const(1, str(call.ty.dtype.dtype))
        # Only inner calls are bound: FuseOps does not fuse through a variable bound to a variable.
        if exponent == 2:
            return call_of("multiply", x, x)
        if exponent == 3:
            return call_of("multiply", bb.emit(call_of("multiply", x, x)), x)
        if exponent == -1:
            return call_of("divide", one, x)
        if exponent == -2:
            return call_of("divide", one, bb.emit(call_of("multiply", x, x)))
        if exponent == -0.5:
            return call_of("rsqrt", x)
        return others(bb, call)

    return legalize
