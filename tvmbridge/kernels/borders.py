"""Marker operators where gradients enter and leave the backward of a custom autograd function.

Code outside of the markers is linear in the gradients. Code between them need not be: a custom
backward may compute anything, even from the zeros that it gets for outputs without a gradient. So
passes over a joint function must know where it is. Each marker returns its first operand; the
markers are removed before the function is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax

from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.kernels.aten_call import aten_call_operator, spec_of

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("enters(Tensor gradient, int function) -> Tensor")
_LIBRARY.define("leaves(Tensor result, Tensor[] gradients) -> Tensor")


def _copied(result: torch.Tensor, _: int | Sequence[torch.Tensor]) -> torch.Tensor:
    return result.clone()


for _name in ("enters", "leaves"):
    _LIBRARY.impl(_name, _copied, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _copied, lib=_LIBRARY)

enters = torch.ops.tvmbridge.enters.default
leaves = torch.ops.tvmbridge.leaves.default
BORDERS = (enters, leaves)
_NAMES = tuple(map(str, BORDERS))


def is_border(value: relax.Expr) -> bool:
    """Whether ``value`` is a call of one of the two marker operators."""
    return isinstance(value, relax.Call) and aten_call_operator(value) in _NAMES


def function_entered(value: relax.Expr) -> int | None:
    """Return the number of the custom function whose backward begins at ``value``, else None."""
    if not isinstance(value, relax.Call) or aten_call_operator(value) != _NAMES[0]:
        return None
    return int(spec_of(value)["args"][1])


def inside(call: relax.Call) -> relax.Expr:
    """Return the operand that a marker passes through."""
    return call.args[2]
