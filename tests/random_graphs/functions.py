"""Custom autograd functions that drawn programs call."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class Scaled(Function):
    """Multiply by a number that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: float) -> torch.Tensor:
        ctx.number = number
        return x * number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.number, None


class Reversed(Function):
    """Return a view of the argument; backward negates the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -gradient


class StraightThrough(Function):
    """Round a quarter of the argument; backward passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 0.25)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class Clipped(Function):
    """The sine, with a backward that is no linear function of the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient.clamp(-0.5, 0.5) * torch.cos(x)


class Pair(Function):
    """Return two results of two arguments that broadcast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.broadcast_tensors(x, y)
        ctx.save_for_backward(x, y)
        return x * y, x + 2 * y

    @staticmethod
    def backward(ctx: Any, product: torch.Tensor, total: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return product * y + total, product * x + 2 * total


class Lazy(Function):
    """Return two results; backward gets None in place of a gradient that is missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 3, torch.cos(x.detach())

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        given = [g * n for g, n in ((first, 3), (second, 0.5)) if g is not None]
        return sum(given) if given else None


class Marked(Function):
    """Return two results, of which the second is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sign = torch.sign(x)
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return x.abs(), sign

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> Any:
        (sign,) = ctx.saved_tensors
        return gradient * sign


class Written(Function):
    """Halve the argument in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 0.5


class Apart(Function):
    """A sum written with ``setup_context``; the second argument gets no gradient."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.sum_to_size(ctx.shape), None
