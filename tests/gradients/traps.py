"""Functions whose gradients are easily wrong: at kinks and ties, in pooling, through indexing."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.frontend.helpers import Cases
from tests.gradients.cases import integers, mask, normal, special

X, Y = normal(3, 4), normal(3, 4, seed=1)
IMAGE = normal(2, 3, 7, 7)
KERNEL = normal(4, 3, 3, 3, seed=2)
ROWS = torch.tensor([2, 0, 2, -1])
TIES = integers(4, 5)

KINKS: Cases = {
    "relu at 0": (lambda x: x.relu(), (special(),)),
    "abs at 0": (lambda x: x.abs(), (special(),)),
    "clamp at its bounds": (lambda x: (x.clamp(-1, 1), x.clamp(min=0.5)), (special(),)),
    "hardtanh at its bounds": (lambda x: functional.hardtanh(x), (special(),)),
    "leaky relu at 0": (lambda x: functional.leaky_relu(x, 0.1), (special(),)),
    "elu and softplus": (lambda x: (functional.elu(x), functional.softplus(x)), (special(),)),
    "sqrt and rsqrt at 0": (lambda x: (x.abs().sqrt(), (x.abs() + 1).rsqrt()), (special(),)),
    "standard deviation of equals": (lambda x: x.std(1), (torch.ones(3, 4).double(),)),
    "norm of zeros": (lambda x: (x.norm(), x.norm(dim=1)), (torch.zeros(3, 4).double(),)),
    "power": (lambda x: (x**2, x**3, x.abs() ** 0.5, x**0), (special(),)),
    "numbers that a simplifier folds": (
        lambda x: (x * 0, 0 / x, x - x, (x + 1e8) - 1e8, (x + 1) - (x + 1), x * 3 / 3),
        (special(),),
    ),
    "where with NaN not chosen": (lambda x: torch.where(x > 0, x.log(), x), (special(),)),
}

TIED: Cases = {
    "maximum of equals": (lambda x, y: torch.maximum(x, y), (TIES, TIES.flip(0))),
    "minimum of equals": (lambda x, y: torch.minimum(x, y), (TIES, TIES.flip(0))),
    "amax and amin": (lambda x: (x.amax(1), x.amin(0), x.amax()), (TIES,)),
    "max and min with indices": (lambda x: (x.max(1).values, x.min(0).values), (TIES,)),
    "max of all": (lambda x: x.max() + x.min(), (TIES,)),
    "topk and sort": (lambda x: (x.topk(2).values, x.sort(stable=True).values), (TIES,)),
    "max pool of equals": (lambda x: functional.max_pool2d(x, 2), (TIES[None, None],)),
}

POOLS: Cases = {
    "max pool, sizes that do not divide": (lambda x: functional.max_pool2d(x, 2), (IMAGE,)),
    "max pool with padding": (lambda x: functional.max_pool2d(x, 3, 2, 1), (IMAGE,)),
    "average pool with ceil_mode": (
        lambda x: functional.avg_pool2d(x, 2, ceil_mode=True),
        (IMAGE,),
    ),
    "average pool, another divisor": (
        lambda x: functional.avg_pool2d(x, 3, 2, 1, False, False, 5),
        (IMAGE,),
    ),
    "adaptive pool": (lambda x: functional.adaptive_avg_pool2d(x, 3), (IMAGE,)),
    "dilated convolution": (
        lambda x, w: functional.conv2d(x, w, dilation=2, padding=1),
        (IMAGE, KERNEL),
    ),
    "transposed convolution": (
        lambda x, w: functional.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=1),
        (IMAGE, KERNEL),
    ),
    "interpolation": (
        lambda x: functional.interpolate(x, size=(5, 9), mode="bilinear", align_corners=True),
        (IMAGE,),
    ),
    "batch norm in training": (
        lambda x: functional.batch_norm(x, None, None, training=True),
        (IMAGE,),
    ),
    "group norm": (lambda x: functional.group_norm(x, 3), (IMAGE,)),
}

MOVES: Cases = {
    "detached factor": (lambda x: x * x.detach(), (X,)),
    "where of broadcast operands": (
        lambda m, x, y: torch.where(m, x, y),
        (mask(3, 4), X[:, :1], Y[0]),
    ),
    "padding index": (
        lambda w, i: functional.embedding(i, w, padding_idx=2),
        (X, torch.tensor([[0, 2], [2, 1]])),
    ),
    "rows taken twice, and from behind": (lambda x, i: x[i], (X, ROWS)),
    "take by a 2-d index": (
        lambda x, i: (torch.take(x, i), x[i[0, :1]], x.index_select(0, i[1])),
        (X, torch.tensor([[0, 2], [2, 1]])),
    ),
    "gather and scatter_add": (
        lambda x, y, i: (x.gather(1, i), x.scatter_add(1, i, y[:, :2].contiguous())),
        (X, Y, torch.tensor([[0, 0], [1, 3], [2, 2]])),
    ),
    "index_put": (
        lambda x, v, i: (x.index_put((i,), v, accumulate=True), x.index_put((i[1:3],), v[1:3])),
        (X, normal(4, 4, seed=3), ROWS),
    ),
    "triangles": (lambda x: (x.tril(-1), x.triu(1)), (X,)),
    "slices with steps, and from behind": (
        lambda x: (x[:, ::2] * 2, x[-1].exp(), x[:, -3:-1] * x[:, 1:3]),
        (X,),
    ),
    "tile, flip, roll, stack": (
        lambda x, y: (x.repeat(2, 1), x.flip(0, 1), x.roll(1, 0), torch.stack([x, y], 1)),
        (X, Y),
    ),
    "padding": (lambda x: (functional.pad(x, (1, 2)), functional.pad(x, (-1, 1, 2, 0))), (X,)),
    "cumulative sum and product": (lambda x: (x.cumsum(1), x.cumprod(0)), (X,)),
    "product with a zero": (lambda x: x.prod(1), (TIES,)),
    "comparisons as factors": (
        lambda x, y: (x * (x > y), x * torch.logical_not(y > 0), x * x.argmax(1)[:, None]),
        (X, Y),
    ),
    "rounding": (lambda x: (x.floor() + x, x.round() * x, x.sign() * x, x.ceil()), (X,)),
    "read twice, and through a view": (lambda x: (x.view(-1) * x.reshape(-1), x.t() @ x), (X,)),
    "a product that broadcasts its batch": (
        lambda x, y: (x[None] @ y.t(), torch.einsum("ij,kj->ik", x, y), torch.outer(x[0], y[0])),
        (X, Y),
    ),
}
