"""Legalizations of Relax operators that replace TVM's: vectorizable, with PyTorch's exact meaning.

Use: ``relax.transform.LegalizeOps(customize_legalize_map=LEGALIZE_MAP)``.
"""

from __future__ import annotations

import operator

from tvm import ir, tirx
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize import normalizations
from tvmbridge.legalize.arithmetic import absolute, arithmetic, cast, negative
from tvmbridge.legalize.comparisons import COMPARISONS
from tvmbridge.legalize.elementwise import binary, clip, larger, relu, smaller, unary, unary_float
from tvmbridge.legalize.pieces import concat
from tvmbridge.legalize.powers import power
from tvmbridge.legalize.reductions import reduction


def _upstream(name: str) -> LegalizeFunc:
    legalize: LegalizeFunc = ir.Op.get(name).get_attr("FLegalize")
    return legalize


LEGALIZE_MAP: dict[str, LegalizeFunc] = {
    **{
        f"relax.{name}": arithmetic(function, name, _upstream(f"relax.{name}"))
        for name, function in (
            ("add", operator.add),
            ("subtract", operator.sub),
            ("multiply", operator.mul),
            ("divide", tirx.div),
        )
    },
    "relax.astype": cast(_upstream("relax.astype")),
    "relax.abs": absolute(_upstream("relax.abs")),
    "relax.negative": negative(_upstream("relax.negative")),
    "relax.exp": unary_float("exp"),
    "relax.log": unary_float("log"),
    "relax.erf": unary_float("erf"),
    "relax.tanh": unary_float("tanh"),
    "relax.sigmoid": unary_float("sigmoid"),
    "relax.rsqrt": unary_float("rsqrt"),
    "relax.sqrt": unary_float("sqrt"),
    "relax.nn.gelu": unary_float("gelu"),
    "relax.nn.gelu_tanh": unary_float("gelu_tanh"),
    "relax.nn.silu": unary_float("silu"),
    "relax.nn.relu": unary(relu, "relu"),
    "relax.maximum": binary(larger, "maximum"),
    "relax.minimum": binary(smaller, "minimum"),
    "relax.clip": clip,
    **COMPARISONS,
    "relax.nn.softmax": normalizations.softmax,
    "relax.nn.log_softmax": normalizations.softmax,
    "relax.nn.layer_norm": normalizations.norm,
    "relax.nn.rms_norm": normalizations.norm,
    **{f"relax.{kind}": reduction(kind) for kind in ("sum", "mean", "variance", "prod")},
    **{f"relax.{kind}": reduction(kind) for kind in ("max", "min")},
}
LEGALIZE_MAP["relax.concat"] = concat(_upstream("relax.concat"))
LEGALIZE_MAP["relax.power"] = power(LEGALIZE_MAP, _upstream("relax.power"))

__all__ = ["LEGALIZE_MAP"]
