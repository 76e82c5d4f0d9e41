"""Modules that are called with several sizes, and the sizes, for ``test_other_sizes.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from tests.frontend.helpers import Function
from tests.random_sizes.attention_forms import Cached, Sliding


@dataclass(frozen=True)
class Case:
    """A module and its calls.

    - ``make``: returns the module.
    - ``arguments``: returns the arguments of a call with the given sizes.
    - ``sizes``: the sizes of the calls, in order.
    - ``trains``: whether the module is in train mode, and gradients are compared.
    - ``spec``: the spec of the sizes.
    - ``sampled``: whether the first arguments are given as a sample.
    - ``rounds``: how often the calls are made.
    - ``unserved``: the number of calls that run the module's own forward; None: any number.
    - ``compilations``: the number of compilations of code for any size; None: any number.
    - ``exact``: whether eager PyTorch computes in float64; it draws other numbers then.
    - ``bound``: the largest absolute error of gradients, if ``exact``.
    - ``relative``: the largest relative error, if ``exact``.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[..., Any]
    sizes: Sequence[tuple[int, ...]]
    trains: bool = False
    spec: Any = "auto"
    sampled: bool = False
    rounds: int = 1
    unserved: int | None = 0
    compilations: int | None = None
    exact: bool = False
    bound: float = 1e-5
    relative: float = 1e-4


def _halves(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Pool and repeat a sequence, and add it to itself, so that its length must be even."""
    pooled = functional.avg_pool1d(x, 2)
    return torch.cat([x + pooled.repeat_interleave(2, -1), more], -2) * more.mean()


def _convolutions() -> nn.Module:
    """Return a model with batch norm, whose statistics in train mode depend on the batch size."""
    norm, last = nn.BatchNorm2d(4), nn.Linear(64, 5)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), norm, nn.ReLU(), nn.Flatten(), last)


class Grown(nn.Module):
    """Appends a row to two tensors of equal length, as a decoder does to its keys and values."""

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        row = x.view(2, 1, 3, 4).transpose(1, 2)
        return torch.cat([keys, row], 2) * torch.cat([values, row], 2)


def _decoded(length: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 1, 12), *torch.randn(2, 2, 3, length, 4)


class Attention(nn.Module):
    """Attention whose mask is an argument, and no constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)[:, None]
        return functional.scaled_dot_product_attention(q, q, q, mask[:, None, None])


class Heads(nn.Module):
    """Two heads, whose transpositions are equal kernels for two positions alone.

    The gradient of the places is a sum over columns: one block of them for two positions. The sum
    for the scores' gradient has rows of columns, with several blocks in each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, 8))
        self.scores = nn.Parameter(torch.randn(2, 40, 40))
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        split = (x + self.places[:n]).view(b, n, 2, 4).transpose(1, 2)
        at = torch.arange(n)
        scores = split.sum(-1, keepdim=True) * self.scores[:, :n, :n]
        seen = torch.where(at <= at[:, None], scores, torch.zeros(())).softmax(-1)
        mixed = self.inner(seen @ split)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(b, n, 8))
        return y


class Sums(nn.Module):
    """Sums in several orders, and a variance: at two columns, its count less one is one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x * self.scale
        return x.sum(), x.sum(0), x.sum(1), x.var(1)


class Classes(nn.Module):
    """Two ranges: of the rows, and of the classes; two is the least size of a symbol."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.linear, self.classes = nn.Linear(6, classes), classes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.linear(x).log_softmax(-1)
        rows, classes = torch.arange(x.shape[0]), torch.arange(self.classes)
        weighed = scores * (classes + 1.0) + rows.cos()[:, None]
        return weighed, weighed[rows, rows % self.classes].mean()


class Large(nn.Module):
    """The large elements of a product: all, as many as half of the rows, and one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x).tanh()
        rows, large = x.shape[0], y[y > 0]
        halved = large[: rows // 2], large[:rows].view(-1, 1)
        return y.softmax(-1), large * 2, (y.sum(-1) > 0).nonzero(), *halved


class Drawn(nn.Module):
    """Draws from probabilities that the module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chances = self.linear(x).sigmoid()
        return torch.bernoulli(chances.detach()) * chances, chances.log()


def _squeezed(x: torch.Tensor) -> torch.Tensor:
    """Compute something else for one row, and for one column."""
    if x.shape[0] == 1:
        return x.exp() * 3
    return x.squeeze(1) * 2 if x.shape[1] == 1 else x.softmax(1)


def _limited(x: torch.Tensor) -> torch.Tensor:
    """Use a minimum and a maximum of a size and a number."""
    columns = min(5, x.shape[1])
    return x[:, :columns].sum(1) / columns + max(7, x.shape[1])


def _other_at_one_left(x: torch.Tensor) -> torch.Tensor:
    """Compute something else where one position is left."""
    x = x[:, 1:]
    return x.exp() * 3 if x.shape[1] == 1 else x.softmax(1)


class Recurrent(nn.Module):
    """A layer of LSTM, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0])


class Compares(nn.Module):
    """Adds rows of equal length, and the means of others."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + (y.sum(1) if x.shape[1] == y.shape[1] else y.mean(1))


def _with_caches(batch: int, cached: int) -> tuple[torch.Tensor, ...]:
    caches = (torch.randn(batch, cached, 2, 4).transpose(1, 2) for _ in range(2))
    return torch.randn(batch, 1, 8), *caches


# Odd sizes, primes, and the least size of a symbol.
_LEAST = ((2, 2), (2, 3), (3, 2), (7, 13), (2, 31), (17, 2))
_PARTS = ((8,), (11,), (5,), (30,), (13,))
CASES: dict[str, Case] = {
    "batch norm": Case(
        _convolutions,
        lambda n: torch.randn(n, 3, 8, 8),
        [(8,), (3,), (16,), (5,)],
        trains=True,
        sampled=True,
        rounds=2,
        exact=True,
    ),
    # Each row is padded by one element, so that sizes are one more than the argument's.
    "rows of one more": Case(
        lambda: Function(lambda x: (functional.pad(x, (1, 0)).softmax(-1), x.mean(1), x.var(1))),
        lambda n: torch.randn(3, n),
        [(20,), (31,), (15,), (32,), (64,), (47,), (63,)],
        sampled=True,
        rounds=2,
        exact=True,
    ),
    # Without the first column, sizes of one more than a multiple of 16 fill whole vectors.
    "columns of one less": Case(
        lambda: Function(lambda x: ((y := x[:, 1:].flatten()).exp(), y.abs().sqrt().sum())),
        lambda b, n: torch.randn(b, n),
        [(10, 119), (34, 49), (7, 20), (9, 65), (33, 17), (5, 31)],
        sampled=True,
        rounds=2,
        exact=True,
    ),
    # No range of sizes can express a parity, and the limit of three codes for single sizes is
    # reached: two calls run the module's own forward.
    "parity": Case(
        lambda: Function(lambda x: x * 2 if x.shape[0] % 2 else x + 1),
        lambda n: torch.randn(n, 3),
        [(5,), (7,), (8,), (12,), (9,)],
        sampled=True,
        rounds=2,
        unserved=2,
        exact=True,
    ),
    "first rows": Case(
        lambda: Function(lambda x: x[: min(x.shape[0], 30)] * 2),
        lambda n: torch.randn(n, 3),
        [(40,), (35,), (29,), (64,), (8,)],
        sampled=True,
        rounds=2,
        exact=True,
    ),
    # First both sizes change; later shapes have sizes that are small or 1. An empty one is eager's.
    "smallest": Case(
        lambda: Function(lambda x: (x @ x.mT).softmax(-1) @ x),
        lambda b, n: torch.randn(b, n, 4),
        [(6, 9), (7, 20), (2, 2), (3, 3), (1, 1), (1, 7), (1, 12), (2, 40), (40, 2), (0, 9)],
        sampled=True,
        unserved=1,
    ),
    "related": Case(
        lambda: Function(_halves),
        lambda n, rows: (torch.randn(3, n), torch.randn(rows, n)),
        [(30, 3), (34, 4), (80, 5), (62, 9), (6, 7)],
        compilations=2,
    ),
    # Rows are symbolic with the first size that changes, where they may be.
    "softmax": Case(
        lambda: nn.Softmax(-1),
        lambda b, n: torch.randn(b, n),
        [(8, 10), (8, 12), (8, 11), (5, 12)],
        sampled=True,
        compilations=1,
    ),
    "eight rows": Case(
        lambda: Function(lambda x: x.view(8, -1).softmax(-1)),
        lambda b, n: torch.randn(b, n),
        [(8, 10), (8, 12), (8, 11), (8, 14)],
        sampled=True,
        compilations=2,
        unserved=1,
    ),
    "the smaller of two sizes": Case(
        lambda: Function(lambda x: x.diagonal().tanh()),
        lambda b, n: torch.randn(b, n),
        [(31, 9), (24, 24), (40, 16), (50, 17), (17, 129), (9, 31)],
        unserved=None,
    ),
    # A mask that is no constant makes no decision by sizes.
    "mask": Case(
        Attention,
        lambda b, n: (torch.randn(b, n, 8), torch.ones(b, n, dtype=torch.bool)),
        [(2, 16), (3, 23), (4, 31), (5, 37), (2, 40), (6, 18)],
        exact=True,
    ),
    "dropout": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)),
        lambda n: torch.randn(n, 8),
        [(4,), (7,), (12,), (5,)],
        trains=True,
        sampled=True,
    ),
    "grown": Case(Grown, _decoded, [(16,), (17,), (18,), (40,)]),
    "grown, declared": Case(
        Grown,
        _decoded,
        [(16,), (17,), (18,), (40,)],
        spec=(None, {2: Dim.AUTO}, {2: Dim.AUTO}),
    ),
    "heads": Case(
        Heads,
        lambda b, n: torch.randn(b, n, 8),
        _LEAST,
        trains=True,
        spec=({0: Dim("batch", max=32), 1: Dim("length", max=40)},),
        compilations=1,
        exact=True,
        bound=1e-4,
    ),
    # Of two rows one difference is left, which is no symbolic size. The first call with another
    # size, for which code is compiled, has it.
    "differences": Case(
        lambda: Function(lambda x: (x[:, 1:] - x[:, :-1]).softmax(1)),
        lambda b, n: torch.randn(b, n, 6),
        [(4, 20), (4, 2), (4, 9), (4, 3), (5, 21), (3, 2), (7, 4), (2, 70), (9, 3)],
    ),
    "sums": Case(
        Sums,
        lambda b, n: torch.randn(b, n),
        [(2, 2), (3, 5), (7, 7), (2, 31), (17, 2), (8, 16)],
        trains=True,
        spec={"x": {0: Dim.AUTO, 1: Dim.AUTO}},
        exact=True,
        bound=1e-4,
    ),
    # A batch may have as many rows as there are classes.
    "classes": Case(
        Classes,
        lambda n: torch.randn(n, 6),
        [(8,), (6,), (2,), (12,), (4,)],
        trains=True,
        sampled=True,
        exact=True,
        relative=1e-5,
    ),
    # Sizes of one need no code of their own.
    "one": Case(
        lambda: Function(lambda x: functional.layer_norm(x, (8,)) - x.softmax(1)),
        lambda b, n: torch.randn(b, n, 8),
        [(20, 40), (24, 50), (1, 40), (30, 1), (1, 1), (2, 3), (1, 7)],
        compilations=1,
        exact=True,
    ),
    "another branch at one": Case(
        lambda: Function(_squeezed),
        lambda b, n: torch.randn(b, n, 4),
        [(5, 6), (7, 9), (1, 6), (5, 1), (1, 1)],
        exact=True,
    ),
    # Two positions of which one is left need no code of their own.
    "one left": Case(
        lambda: Function(lambda x: x[:, 1:].softmax(1)),
        lambda b, n: torch.randn(b, n),
        [(4, 20), (6, 33), (4, 2), (1, 2), (2, 5)],
        compilations=2,
        exact=True,
    ),
    "another branch at one left": Case(
        lambda: Function(_other_at_one_left),
        lambda b, n: torch.randn(b, n),
        [(5, 6), (7, 9), (5, 2), (2, 2), (3, 2)],
        exact=True,
    ),
    # At small sizes another side of a minimum is chosen.
    "limits": Case(
        lambda: Function(_limited),
        lambda b, n: torch.randn(b, n),
        [(2, 9), (2, 12), (1, 3), (2, 4), (2, 6)],
        exact=True,
    ),
    # One row of patches does not limit the code for more.
    "patches": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.Softmax(2)),
        lambda b, h, w: torch.randn(b, 3, h, w),
        [(2, 20, 24), (3, 4, 12), (2, 16, 28), (5, 40, 8), (3, 24, 36)],
        compilations=2,
        exact=True,
    ),
    "recurrent": Case(
        Recurrent,
        lambda b, n: torch.randn(b, n, 4),
        [(3, 5), (4, 7), (1, 7), (4, 1), (1, 1)],
        trains=True,
        compilations=1,
        exact=True,
        bound=1e-4,
    ),
    # A constant mask that is neither open nor causal has any size.
    "sliding": Case(
        Sliding,
        lambda b, n: torch.randn(b, n, 8),
        [(2, 5), (3, 9), (4, 12)],
        compilations=1,
        exact=True,
    ),
    # Permuted arguments have no symbols for strides.
    "permuted": Case(
        lambda: Function(lambda x: x.softmax(-1)),
        lambda b, n: torch.randn(b, n, 2, 4).transpose(1, 2),
        [(3, 4), (5, 6), (5, 7)],
        compilations=1,
        exact=True,
    ),
    "permuted caches": Case(
        Cached, _with_caches, [(3, 4), (5, 6), (5, 7)], compilations=1, exact=True
    ),
    # Lengths of two arguments that are equal in the first calls may differ later.
    "two lengths": Case(
        lambda: Function(lambda x, y: x.exp() @ y.relu().mT),
        lambda n, m: (torch.randn(3, n, 8), torch.randn(3, m, 8)),
        [(6, 6), (9, 9), (7, 12), (14, 8)],
        compilations=1,
        exact=True,
    ),
    # Forward compares the lengths: code for equal ones gives way to code for all others.
    "compared lengths": Case(
        Compares,
        lambda n, m: (torch.randn(3, n), torch.randn(3, m)),
        [(6, 6), (9, 9), (7, 12), (14, 8)],
        compilations=2,
        exact=True,
    ),
    # Rows of which each may have one element for all elements of the other.
    "one for all": Case(
        lambda: Function(lambda x, y: torch.sin(x) + 2 * y),
        lambda n, m: (torch.randn(3, n), torch.randn(3, m)),
        [(6, 6), (9, 9), (8, 1), (7, 7), (1, 5), (5, 5)],
        exact=True,
    ),
    # PyTorch runs a part of these modules.
    "masked": Case(Large, lambda n: torch.randn(n, 4), _PARTS, trains=True),
    "drawn": Case(Drawn, lambda n: torch.randn(n, 4), _PARTS, trains=True),
}
