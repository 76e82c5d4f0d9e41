"""Modules whose gradients are easily wrong, with arguments and the expected joint source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.joint_modules import (
    Block,
    Classifier,
    ConvNet,
    Head,
    Padded,
    Recurrent,
    Tied,
    Unchanged,
    flipped,
)


def _under_no_grad(m: Head, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (x * m.w).exp()
    return scale * m.w


def _written_under_no_grad(m: Head, x: torch.Tensor) -> torch.Tensor:
    """Write a value in place under no_grad: forward reads the new value, gradients ignore it."""
    product = x * m.w
    with torch.no_grad():
        product.mul_(2).view(-1)[0].fill_(0.25)
    return torch.tanh(product)


def _viewed_under_no_grad(m: Head, x: torch.Tensor) -> torch.Tensor:
    product = x * m.w
    with torch.no_grad():
        view = product.split_with_sizes([1, product.shape[0] - 1], 0)[0]
    return torch.sin(view) * m.w + x


def _straight_through(m: Head, x: torch.Tensor) -> torch.Tensor:
    y = m.fc(x)
    return y + (y.round() - y).detach()


def _written(m: Head, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1.0)
    y = x * m.w
    y[:, 1:3] += m.fc(x)[:, 1:3]
    y[0].mul_(2.0)
    return y.relu_() * m.count


def _moving_average(m: Head, x: torch.Tensor) -> torch.Tensor:
    y = m.fc(x)
    with torch.no_grad():
        m.count.mul_(0.9).add_(y.mean(), alpha=0.1)
    return y - m.count


def _several(m: Head, x: torch.Tensor) -> Any:
    hidden = m.fc(x)
    return {
        "a": hidden,
        "b": [x > 0, (x * m.w).sum()],
        "c": hidden.detach() * 2,
        "d": x * 3,
        "e": 4,
    }


def _checkpointed(reentrant: bool) -> Callable[[Head, torch.Tensor], torch.Tensor]:
    def run(m: Head, x: torch.Tensor) -> torch.Tensor:
        def part(v: torch.Tensor) -> torch.Tensor:
            return F.dropout(m.fc(v), 0.4).tanh()

        return checkpoint(part, x * m.w, use_reentrant=reentrant) * F.dropout(x, 0.2)

    return run


def _noisy(m: Head, x: torch.Tensor) -> torch.Tensor:
    y = x * m.w + torch.randn_like(x)
    y = y * torch.rand(3, 1, dtype=x.dtype) + torch.empty_like(x).uniform_(-1.0, 1.0)
    return F.dropout1d(F.gumbel_softmax(m.fc(y), hard=True)[None], 0.5)


def _masked_attention(m: Head, x: torch.Tensor) -> torch.Tensor:
    q = (x * m.w).view(1, 1, 3, 6)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    return F.scaled_dot_product_attention(q, q, m.fc(q), attn_mask=mask)


@dataclass(frozen=True)
class Case:
    """A module, its arguments, and the joint source that ``joint="auto"`` selects for it."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[torch.Tensor, ...]]
    auto: str


def _rows() -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 6),)


def _head(function: Callable[[Any, torch.Tensor], Any], auto: str) -> Case:
    return Case(lambda: Head(function), _rows, auto)


CASES: dict[str, Case] = {
    "detach": _head(lambda m, x: x * m.w.detach() * m.w, "aot"),
    "detached output": _head(lambda m, x: (x * m.w, m.fc(x).detach()), "aot"),
    "no_grad": _head(_under_no_grad, "aot"),
    "written under no_grad": _head(_written_under_no_grad, "aot"),
    "viewed under no_grad": _head(_viewed_under_no_grad, "aot"),
    "straight through": _head(_straight_through, "aot"),
    "custom function": _head(lambda m, x: flipped(m.fc(x)) * x, "aot"),
    "custom identity": _head(lambda m, x: Unchanged.apply(m.fc(x)), "aot"),
    "checkpoint": _head(_checkpointed(False), "relax"),
    "checkpoint, reentrant": _head(_checkpointed(True), "relax"),
    "written in place": _head(_written, "aot"),
    "moving average": _head(_moving_average, "aot"),
    "several outputs": _head(_several, "aot"),
    "used twice": _head(lambda m, x: m.fc(x) * m.fc(x * m.w) + x, "relax"),
    "noise": _head(_noisy, "aot"),
    "masked attention": _head(_masked_attention, "relax"),
    "convolutions": Case(ConvNet, lambda: (torch.randn(2, 2, 7, 7),), "relax"),
    "tied and frozen": Case(Tied, _rows, "relax"),
    "classifier": Case(
        Classifier,
        lambda: (torch.tensor([[0, 3, 6], [1, 1, 0]]), torch.tensor([4, 2])),
        "relax",
    ),
    "padded embedding": Case(Padded, lambda: (torch.tensor([[3, 3, 6], [1, 0, 0]]),), "relax"),
    "transformer": Case(Block, lambda: (torch.randn(2, 5, 8),), "relax"),
    "recurrent": Case(Recurrent, lambda: (torch.randn(2, 3, 6),), "aot"),
}
