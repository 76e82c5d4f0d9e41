"""Legalization of comparisons that is right for NaN.

TVM simplifies ``not a < b`` to ``b <= a`` and ``a == a`` to true, and compiles ``a != b`` to
"ordered and different"; all are wrong for NaN. So each comparison is combined with a test for NaN
by its bits, and stays right whatever TVM negates or folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax, tirx
from tvm.ir import Call, Expr, GenericConst
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize.arithmetic import is_least
from tvmbridge.legalize.broadcast import emit_broadcast
from tvmbridge.legalize.functions import FLOATS, HALF, is_nan
from tvmbridge.legalize.lets import constant

Compare = Callable[[Expr, Expr], Expr]


def _number(arg: Expr) -> int | float | None:
    """Return the value of a 0-d constant; None for anything else."""
    if isinstance(arg, GenericConst) and not arg.value.shape:
        value: int | float = arg.value.numpy().item()
        return None if is_least(value, str(arg.value.dtype)) else value
    return None


def _guarded(result: Expr, negated: bool, unsure: list[Expr]) -> Expr:
    """Return the result of a comparison; if one of ``unsure`` is NaN, return ``negated``."""
    for value in unsure:
        nan = is_nan(value)
        result = tirx.Or(nan, result) if negated else tirx.And(tirx.Not(nan), result)
    return result


def comparison(compare: Compare, name: str, *, negated: bool = False) -> LegalizeFunc:
    """Return the legalization of a comparison whose result for NaN is ``negated``."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        dtype = str(call.args[0].ty.dtype.dtype)
        wide = "float32" if dtype in HALF else dtype
        numbers = [_number(arg) for arg in call.args]
        tensors = [arg if n is None else None for arg, n in zip(call.args, numbers, strict=True)]

        def element(elements: list[Expr | None]) -> Expr:
            sides = [
                tirx.Cast(wide, e) if n is None else constant(n, wide)
                for e, n in zip(elements, numbers, strict=True)
            ]
            unsure = [
                side
                for side, n in zip(sides, numbers, strict=True)
                if dtype in FLOATS and (n is None or math.isnan(n))
            ]
            return _guarded(compare(*sides), negated, unsure)

        return emit_broadcast(bb, call, tensors, element, f"T_{name}", f"tir_{name}")

    return legalize


COMPARISONS: dict[str, LegalizeFunc] = {
    "relax.equal": comparison(tirx.EQ, "equal"),
    "relax.not_equal": comparison(tirx.NE, "not_equal", negated=True),
    "relax.less": comparison(tirx.LT, "less"),
    "relax.less_equal": comparison(tirx.LE, "less_equal"),
    "relax.greater": comparison(tirx.GT, "greater"),
    "relax.greater_equal": comparison(tirx.GE, "greater_equal"),
}
