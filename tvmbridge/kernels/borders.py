"""Borders: where gradients enter the backward of a custom autograd function, and where they leave.

Within them a backward may do anything, also with the zeros that PyTorch gives it for outputs that
no gradient arrives for; outside of them all is linear. While a joint function is made they stand in
the graph as operators that hand on their first operand; before it is compiled they go away.
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
    """Whether ``value`` is a call of one of the two operators."""
    return isinstance(value, relax.Call) and aten_call_operator(value) in _NAMES


def function_entered(value: relax.Expr) -> int | None:
    """The number of the function whose backward the operand of ``value`` enters, if it does."""
    if not isinstance(value, relax.Call) or aten_call_operator(value) != _NAMES[0]:
        return None
    return int(spec_of(value)["args"][1])


def inside(call: relax.Call) -> relax.Expr:
    """What a border hands on."""
    return call.args[2]
