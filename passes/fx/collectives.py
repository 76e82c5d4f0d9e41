"""Collectives in two parts, a request and a wait, with gradients in two parts as well.

In backward the wait comes first, and requests what the gradient needs; the request comes last and
waits for it. Autograd runs what was recorded between the two in forward between them in backward.
Waits are tied one to the next by a token of no elements, so that the gradients of all ranks are
requested in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.core.torch_private import functional_collectives
from tvmbridge.passes.fx.peers import lost

_PLAIN = torch.ops._c10d_functional
# Namespaces of collectives: the second has gradients in every version of PyTorch.
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
NAMES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


Plain: TypeAlias = tuple[str, bool, str, Any]


@dataclass(frozen=True)
class Collective:
    """Which collective it is: by name, whether it has a gradient, its reduction and group."""

    name: str
    differentiable: bool
    reduction: str
    group: Any

    @classmethod
    def of(cls, target: Any, reduction: str, group: Any) -> Collective:
        """That of an operator."""
        namespace, _, name = target._schema.name.partition("::")
        has_gradient = hasattr(functional_collectives(), f"{name}_backward")
        return cls(name, namespace == NAMESPACES[1] or has_gradient, reduction, group)

    @property
    def plain(self) -> Plain:
        """Its fields, as a graph can hold them."""
        return self.name, self.differentiable, self.reduction, self.group


@dataclass
class Begun:
    """A collective that is under way.

    ``pending`` is its result, not to be read yet. ``link`` has no elements; through it autograd
    knows that the wait belongs to the request. ``gradient`` is under way in backward.
    """

    pending: torch.Tensor
    link: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


def request(
    tensor: torch.Tensor, plain: Plain, sizes: Sequence[int], sent: Sequence[int] = ()
) -> Begun:
    """Begin a collective, whose result :func:`wait` returns.

    Args:
        tensor: what is sent.
        plain: which one, as :attr:`Collective.plain` tells it.
        sizes: of all_to_all_single, how many rows come from each rank; otherwise the number of
            ranks.
        sent: of all_to_all_single, how many rows go to each rank.

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
    """The result of a collective, and the token for the next wait.

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
    """Begin the collective that the gradient of another one is."""
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
