"""Collectives in two parts, a request and a wait, with gradients in two parts as well.

Backward visits the wait first, which begins the collective of the gradient. It visits the request
last, which waits for that collective. Autograd runs the backward of all operators between the two
in the meantime. A token without elements connects each wait to the next one, so that all ranks
begin the collectives of their gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.core.torch_private import functional_collectives
from tvmbridge.passes.fx.peers import lost

_PLAIN = torch.ops._c10d_functional
# Only collectives of the second namespace have gradients in every version of PyTorch.
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
NAMES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


Plain: TypeAlias = tuple[str, bool, str, Any]


@dataclass(frozen=True)
class Collective:
    """The kind of a collective.

    - ``name``: the operator's name without its namespace, one of ``NAMES``.
    - ``differentiable``: whether it has a gradient.
    - ``reduction``: the reduction, such as ``"sum"``; empty if it reduces nothing.
    - ``group``: the process group, or its name.
    """

    name: str
    differentiable: bool
    reduction: str
    group: Any

    @classmethod
    def of(cls, target: Any, reduction: str, group: Any) -> Collective:
        """Describe the collective that the operator ``target`` performs."""
        namespace, _, name = target._schema.name.partition("::")
        has_gradient = hasattr(functional_collectives(), f"{name}_backward")
        return cls(name, namespace == NAMESPACES[1] or has_gradient, reduction, group)

    @property
    def plain(self) -> Plain:
        """The fields as a tuple of plain values, which can be an argument of a node."""
        return self.name, self.differentiable, self.reduction, self.group


@dataclass
class Begun:
    """A collective that is under way.

    - ``pending``: its result, which must not be read before :func:`wait`.
    - ``link``: a tensor without elements by which autograd connects the wait to the request; None
      if no gradient is needed.
    - ``gradient``: the result of the collective that backward has begun; None if there is none.
    """

    pending: torch.Tensor
    link: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


def request(
    tensor: torch.Tensor, plain: Plain, sizes: Sequence[int], sent: Sequence[int] = ()
) -> Begun:
    """Begin a collective, whose result :func:`wait` returns.

    Args:
        sizes: for all_to_all_single, the number of rows to receive from each rank; otherwise a
            list of one item, the number of ranks.
        sent: for all_to_all_single, the number of rows to send to each rank.

    Raises:
        CommunicationError: a rank has ended.
    """
    collective = Collective(*plain)
    begun = Begun(_begun(tensor.detach(), collective, sizes, sent))
    if tensor.requires_grad and torch.is_grad_enabled() and collective.differentiable:
        begun.link = _Request.apply(tensor, begun)  # type: ignore[no-untyped-call]
    return begun


def wait(
    begun: Begun,
    token: torch.Tensor | None,
    plain: Plain,
    sizes: Sequence[int],
    sent: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Wait for a collective; return its result, and the token for the next wait.

    The arguments ``plain``, ``sizes`` and ``sent`` are those of :func:`request`.

    Raises:
        CommunicationError: a rank has ended.
    """
    result = _ended(begun.pending)
    if begun.link is None:
        return result, token
    token = begun.link.new_empty(0) if token is None else token
    spec = Collective(*plain), sizes, sent
    result, after = _Wait.apply(  # type: ignore[no-untyped-call]
        begun.link, token, result, begun, spec
    )
    return result, after


def _begun(
    tensor: torch.Tensor, collective: Collective, sizes: Sequence[int], sent: Sequence[int]
) -> torch.Tensor:
    tensor, group = tensor.contiguous(), collective.group
    call: Any = getattr(_PLAIN, collective.name)
    try:
        if collective.name == "all_to_all_single":
            return call(tensor, list(sizes), list(sent), group)
        if collective.name == "all_reduce":
            return call(tensor, collective.reduction, group)
        if collective.name == "reduce_scatter_tensor":
            return call(tensor, collective.reduction, sizes[0], group)
        return call(tensor, sizes[0], group)
    except RuntimeError as error:
        raise lost(error) from error


def _ended(pending: torch.Tensor) -> torch.Tensor:
    try:
        result: torch.Tensor = _PLAIN.wait_tensor(pending)
    except RuntimeError as error:
        raise lost(error) from error
    return result


def _gradient(
    grad: torch.Tensor, collective: Collective, sizes: Sequence[int], sent: Sequence[int]
) -> torch.Tensor:
    """Begin the collective that computes the gradient of ``collective``."""
    name, group = collective.name, collective.group
    if collective.reduction not in ("", "sum"):
        raise RuntimeError(f"the gradient of {name} is that of sums, not of {collective.reduction}")
    other = {"all_gather_into_tensor": "reduce_scatter_tensor"}.get(name, name)
    other = "all_gather_into_tensor" if name == "reduce_scatter_tensor" else other
    return _begun(grad, Collective(other, False, "sum", group), sent or sizes, sizes)


class _Request(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, begun: Begun) -> torch.Tensor:
        ctx.begun = begun
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: torch.Tensor) -> Any:
        gradient, ctx.begun.gradient = ctx.begun.gradient, None
        return None if gradient is None else _ended(gradient), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: torch.Tensor,
        token: torch.Tensor,
        result: torch.Tensor,
        begun: Begun,
        spec: tuple[Collective, Sequence[int], Sequence[int]],
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.begun, ctx.spec = begun, spec
        return result.view_as(result), token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Any, token: Any) -> Any:
        if grad is not None:
            ctx.begun.gradient = _gradient(grad, *ctx.spec)
        empty = (grad if token is None else token).new_empty(0)
        return empty, empty, None, None, None
