"""Gradient rules: which operators TVM's Gradient may differentiate, and by which rules.

A call is differentiated only if two conditions hold. :data:`CLAIMED` has the operator, with a
condition that the call's arguments satisfy. The conformance tests have admitted the rule for the
call's dtypes (``tvmbridge/core/admission.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tvm
from tvm import relax

from tvmbridge.core.admission import is_proven
from tvmbridge.gradients.aten import ATEN_RULES, is_pulled_back
from tvmbridge.gradients.aten_moves import MOVE_RULES, can_move_back
from tvmbridge.gradients.helpers import Differentiated
from tvmbridge.gradients.powers import has_short_form
from tvmbridge.gradients.pulled import aten_gradients
from tvmbridge.gradients.rules import CONVOLUTION_RULES, OWN_RULES, Rule, is_plain
from tvmbridge.kernels.aten_call import aten_call_operator

# TVM's own registrations have level 10, and a higher level overrides them.
_LEVEL = 20

Condition = Callable[[relax.Call], bool]


def _always(call: relax.Call) -> bool:
    return True


def _steps_of_one(call: relax.Call) -> bool:
    return len(call.args) < 5 or all(int(s.value) == 1 for s in call.args[4].fields)


def _indices_of_rank_one(call: relax.Call) -> bool:
    return call.args[1].ty.ndim == 1 and call.attrs.axis is not None


def _fills_with_a_number(call: relax.Call) -> bool:
    return isinstance(call.args[1], tvm.ir.GenericConst)


_UPSTREAM_RULES: tuple[str, ...] = (
    "relax.add",
    "relax.subtract",
    "relax.multiply",
    "relax.negative",
    "relax.exp",
    "relax.log",
    "relax.sqrt",
    "relax.sin",
    "relax.cos",
    "relax.tanh",
    "relax.sigmoid",
    "relax.nn.softmax",
    "relax.nn.log_softmax",
    "relax.sum",
    "relax.mean",
    "relax.permute_dims",
    "relax.reshape",
    "relax.expand_dims",
    "relax.broadcast_to",
    "relax.split",
    "relax.matmul",
    "relax.astype",
)

CLAIMED: dict[str, Condition] = {
    **dict.fromkeys((*_UPSTREAM_RULES, *OWN_RULES), _always),
    "relax.strided_slice": _steps_of_one,
    "relax.full": _fills_with_a_number,
    "relax.power": has_short_form,
    "relax.take": _indices_of_rank_one,
    **dict.fromkeys(CONVOLUTION_RULES, is_plain),
    **dict.fromkeys(ATEN_RULES, is_pulled_back),
    **dict.fromkeys(MOVE_RULES, can_move_back),
}


def rule_name(call: relax.Call) -> str:
    """Return the key of the rule for ``call``: an ATen call's overload, or the Relax operator."""
    return aten_call_operator(call) or str(call.op.name)


def is_admitted(call: relax.Call) -> bool:
    """Whether ``call`` may be differentiated with TVM's Gradient."""
    name = rule_name(call)
    condition = CLAIMED.get(name)
    return condition is not None and condition(call) and is_proven("rules", name, dtypes_of(call))


def dtypes_of(call: relax.Call) -> set[str]:
    """Return the floating-point dtypes of a call's results."""
    types = call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty]
    return {name for name in (str(t.dtype.dtype) for t in types) if "float" in name}


def _packed_rule(of: Differentiated) -> list[relax.Expr]:
    """Return the gradients of a ``relax.call_pure_packed`` by the rule of its ATen operator."""
    name = rule_name(of.call)
    return aten_gradients(MOVE_RULES.get(name) or ATEN_RULES[name], name, of)


@functools.cache
def install_rules() -> None:
    """Register tvmbridge's rules with TVM, overriding its own, before the first gradient."""
    rules = {**OWN_RULES, **CONVOLUTION_RULES, "relax.call_pure_packed": _packed_rule}

    def for_tvm(rule: Rule) -> Callable[..., list[relax.Expr]]:
        return lambda *arguments: rule(Differentiated(*arguments))

    for name, rule in rules.items():
        relax.op.register_gradient(name, for_tvm(rule), level=_LEVEL)
