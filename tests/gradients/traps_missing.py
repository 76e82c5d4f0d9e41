"""Functions for whose operators TVM has no gradient rule."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.frontend.helpers import Cases
from tests.gradients.cases import integers, mask, normal

X, Y = normal(3, 4), normal(3, 4, seed=1)
POSITIVE = X.abs() + 0.1
INSIDE = X.tanh() * 0.9
LINE, IMAGE = normal(2, 4, 9), normal(2, 4, 7, 6)
PLACES = torch.tensor([[0, 2, 1, 0], [1, 0, 2, 1]])
ROWS = torch.tensor([2, 0])

FUNCTIONS: Cases = {
    "erf and gelu": (
        lambda x: (x.erf(), functional.gelu(x), functional.gelu(x, approximate="tanh")),
        (X,),
    ),
    "activations": (
        lambda x: (
            functional.selu(x),
            functional.celu(x, 0.5),
            functional.silu(x),
            functional.mish(x),
            functional.hardswish(x),
            functional.logsigmoid(x),
        ),
        (X,),
    ),
    "rsqrt, square, reciprocal": (lambda x: (x.rsqrt(), x.square(), x.reciprocal()), (POSITIVE,)),
    "trigonometric": (lambda x: (x.tan(), x.atan(), x.asin(), x.acos()), (INSIDE,)),
    "hyperbolic": (lambda x: (x.sinh(), x.cosh(), x.asinh(), x.atanh(), x.tanh()), (INSIDE,)),
    "logarithms": (
        lambda x, y: (torch.logaddexp(x, y), x.logsumexp(0), x.exp().log1p(), x.expm1(), x.exp2()),
        (X, Y),
    ),
    "remainders": (
        lambda x, y: (torch.remainder(x, y), torch.fmod(x, 0.7), x % 2.5),
        (X, POSITIVE),
    ),
    "powers of tensors": (lambda x, y: (x**y, 2.0**y, torch.atan2(x, y)), (POSITIVE, Y)),
}

SHAPES: Cases = {
    "squeeze and unsqueeze": (
        lambda x: (x[:, None].squeeze(1) * x, x.unsqueeze(-1).exp(), x[:, :1].squeeze()),
        (X,),
    ),
    "slices": (lambda x: (x[1:, 1:3].exp(), x.narrow(1, 0, 2) * x[:, 2:], x[0]), (X,)),
    "slices written": (
        lambda x, y: (
            x.slice_scatter(y[:, :2], 1, 1, 4, 2),
            x.select_scatter(y[0], 0, -1),
            x.diagonal_scatter(y[:, 0]),
        ),
        (X, Y),
    ),
    "padding by what is there": (
        lambda x: tuple(
            functional.pad(x, (1, 2), mode=m) for m in ("reflect", "replicate", "circular")
        ),
        (LINE,),
    ),
    "sums of products": (
        lambda x, y: (
            torch.einsum("bij,bik->bjk", x, y),
            torch.einsum("bij->bi", x),
            torch.einsum("ij,ij,ik->k", x[0], y[0], x[1]),
        ),
        (LINE, LINE.flip(0)),
    ),
    "repeats": (lambda x: (x.tile(2, 2), x.repeat_interleave(2, 1), x.expand(2, 3, 4)), (X,)),
    "triangles of matrices in a batch": (lambda x: (x.tril(), x.triu(-1), x.diagonal()), (IMAGE,)),
    "windows of a signal": (
        lambda x: (x.unfold(2, 3, 2), functional.unfold(x[None], 2), x.as_strided((2, 3), (1, 5))),
        (LINE,),
    ),
}

INDICES: Cases = {
    "gathered elements": (
        lambda x, i: (x.gather(0, i), torch.take_along_dim(x, i[:1], 0)),
        (X, PLACES),
    ),
    "indices of several dimensions": (
        lambda x, i, j: (x[i[0, :2], j], x[:, i], x[i, i], x[None, :, j, None]),
        (X, PLACES, ROWS),
    ),
    "an index without dimensions": (
        lambda x, i: (x.index_select(0, i), torch.take(x, i)),
        (X, torch.tensor(1)),
    ),
    "scattered elements": (
        lambda x, y, i: (
            x.scatter(0, i[:1], y[:1]),
            x.scatter(0, i, 2.5),
            x.scatter_reduce(0, i, y[:2], "sum"),
            x.scatter_reduce(0, i, y[:2], "amax"),
        ),
        (X, Y, PLACES),
    ),
    "rows written": (
        lambda x, y, i: (
            x.index_copy(0, i, y[:2]),
            x.index_add(0, i, y[1:], alpha=2),
            x.index_fill(1, i, 0.5),
            x.index_put((i,), y[:2]),
        ),
        (X, Y, ROWS),
    ),
    "masks": (
        lambda x, y, m: (x.masked_fill(m, 2.0), x.index_put((m,), y[0, 0]), torch.where(m, x, 1.0)),
        (X, Y, mask(3, 4)),
    ),
    "order": (
        lambda x: (
            x.topk(2, 0, largest=False).values,
            x.sort(0, descending=True).values,
            x.median(),
            x.median(1).values,
            x.kthvalue(2).values,
            x.cummax(0).values,
        ),
        (X,),
    ),
    "order of equals": (lambda x: (x.median(1).values, x.cummax(1).values), (integers(4, 5),)),
    "bags of embeddings": (
        lambda w, i: tuple(functional.embedding_bag(i, w, mode=m) for m in ("sum", "mean", "max")),
        (X, PLACES),
    ),
}

# Operators without a gradient, between values that have one.
STOPS: Cases = {
    "bits of masks": (
        lambda x, y: ((x > 0) & (y > 0) | ~(x > y) ^ (y < 1)) * x,
        (X, Y),
    ),
    "logic of numbers": (
        lambda x, y: x * torch.logical_and(x, y) + y * torch.logical_xor(x > 0, y > 0),
        (X, Y),
    ),
    "tests of floats": (
        lambda x: (x * x.isnan(), x * ~x.isinf(), torch.where(x.isfinite(), x, 0 * x)),
        (X,),
    ),
    "one-hot rows": (lambda x, i: functional.one_hot(i, 4)[:, :3] * x, (X, PLACES)),
    "positions": (lambda x: x * torch.arange(4) + torch.arange(3.0)[:, None] * x.sum(), (X,)),
    "positions of the largest": (
        lambda x: (x * x.argmin(0), x.max(1).indices * x[:, 0], x.argsort(1) * x),
        (X,),
    ),
    "whole numbers": (
        lambda x: (x * x.trunc(), x * x.long(), x.floor() / 2 * x, torch.round(x, decimals=1) + x),
        (X,),
    ),
    "a factor counted from a mask": (lambda x, m: x / m.sum() + m.cumsum(1) * x, (X, mask(3, 4))),
}
