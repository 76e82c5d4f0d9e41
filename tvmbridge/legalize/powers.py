"""Legalisation of powers whose exponent is a number: the short forms that PyTorch has, too."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.ir import Call, Expr, GenericConst
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

# Exponents that a power of Relax may have: those for which PyTorch has a short form, as we do.
SHORT_EXPONENTS = (2.0, 3.0, -1.0, -2.0, -0.5)


def exponent_of(call: Call) -> float | None:
    """The number that a ``relax.power`` raises to; None for a tensor."""
    exponent = call.args[1]
    if not isinstance(exponent, GenericConst) or exponent.value.shape:
        return None
    return float(exponent.value.numpy().item())


def power(legalizations: Mapping[str, LegalizeFunc], others: LegalizeFunc) -> LegalizeFunc:
    """The legalisation of ``relax.power`` by those of products, quotients and roots.

    Args:
        legalizations: of ``relax.multiply``, ``relax.divide`` and ``relax.rsqrt``.
        others: for exponents without a short form.
    """

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        x, exponent = call.args[0], exponent_of(call)

        def emit(name: str, *operands: Expr) -> Expr:
            plain = bb.normalize(getattr(relax.op, name)(*operands))
            return bb.emit(legalizations[f"relax.{name}"](bb, plain))

        one = relax.const(1, str(call.ty.dtype.dtype))
        if exponent == 2:
            return emit("multiply", x, x)
        if exponent == 3:
            return emit("multiply", emit("multiply", x, x), x)
        if exponent == -1:
            return emit("divide", one, x)
        if exponent == -2:
            return emit("divide", one, emit("multiply", x, x))
        if exponent == -0.5:
            return emit("rsqrt", x)
        return others(bb, call)

    return legalize
