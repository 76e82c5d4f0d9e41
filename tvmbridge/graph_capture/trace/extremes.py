"""``max``, ``min``, ``median`` and ``nanmedian`` of all elements, with eager's gradient.

Eager PyTorch branches on whether the result is NaN, and scatters the cotangent to the elements
that equal it. For fake tensors it multiplies the cotangent by a mask instead, so that an infinite
or NaN cotangent becomes NaN everywhere. So a trace records one custom operator for the four
functions, and its gradient is computed as in eager PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.graph_capture.trace.function_table import Call, replaces

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("extremum(Tensor input, str kind) -> Tensor")
EXTREMUM = torch.ops.tvmbridge.extremum.default

_KINDS: dict[Any, str] = {
    function: name
    for name in ("max", "min", "median", "nanmedian")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
}


def extremum_taken_apart(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Decompose the custom operator: ``kind`` of all elements of ``x``."""
    if kind in ("max", "min") and x.numel():
        return torch.amax(x) if kind == "max" else torch.amin(x)
    result: torch.Tensor = getattr(torch, kind)(x)
    return result


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradient(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
    x, value = ctx.saved_tensors
    chosen = torch.where(value.isnan(), x.isnan(), x == value)
    share = cotangent / chosen.sum()
    return torch.zeros_like(x).masked_fill(chosen, share), None


_LIBRARY.impl("extremum", extremum_taken_apart, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::extremum", lambda x, kind: x.new_empty([]), lib=_LIBRARY)
torch.library.register_autograd(
    f"{NAMESPACE}::extremum", _gradient, setup_context=_set_up, lib=_LIBRARY
)


@replaces(*_KINDS)
def _of_all_elements(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = [*args, *kwargs.values()]
    if (
        len(operands) == 1
        and torch.is_grad_enabled()
        and isinstance(operands[0], torch.Tensor)
        and operands[0].requires_grad
        and operands[0].numel()
    ):
        return EXTREMUM(operands[0], _KINDS[call.function])
    return call(*args, **kwargs)
