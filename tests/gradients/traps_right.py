"""Functions for which TVM's own gradient rules are right, and must stay right."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.frontend.helpers import Cases
from tests.gradients.cases import mask, normal

A, B, C = normal(3, 4), normal(4, 5, seed=1), normal(4, seed=2)
BATCH, OTHER = normal(2, 3, 4), normal(2, 4, 5, seed=1)
DEEP = normal(2, 2, 3, 4)
IMAGE, KERNEL = normal(2, 4, 7, 6), normal(6, 2, 3, 3)
TARGET = torch.tensor([1, 3, 0])

PRODUCTS: Cases = {
    "matmul of vectors and matrices": (
        lambda a, b, c: (c @ c, a @ c, c @ b, a @ b, a @ a.t()),
        (A, B, C),
    ),
    "matmul of batches": (
        lambda x, y, b, c: (x @ y, x @ b, x[0] @ y, x @ c, c @ y),
        (BATCH, OTHER, B, C),
    ),
    "matmul of batches that broadcast": (
        lambda d, y: (d @ y, d @ y[:, None], d[:, :1] @ y[0], d[:1] @ d.mT),
        (DEEP, OTHER),
    ),
    "products with sums": (
        lambda a, b, x, y: (
            torch.addmm(a[:, :1], a, b, beta=0.5, alpha=2),
            torch.baddbmm(x[:, :, :1], x, y),
            functional.linear(x, b.t(), b[0]),
            torch.bmm(x, y),
        ),
        (A, B, BATCH, OTHER),
    ),
    "attention": (
        lambda q, k, m: (
            functional.scaled_dot_product_attention(q, k, k, m),
            functional.scaled_dot_product_attention(q, k, k.exp(), is_causal=True),
        ),
        (DEEP, DEEP.flip(0), mask(3, 3) | torch.eye(3).bool()),
    ),
    "convolution": (
        lambda x, w: (
            functional.conv2d(x, w, stride=2, padding=1, groups=2),
            functional.conv2d(x, w.flatten(0, 1)[:3, None].expand(3, 4, 3, 3), padding=(0, 2)),
            functional.avg_pool2d(x, 2, 1),
        ),
        (IMAGE, KERNEL),
    ),
}

REDUCTIONS: Cases = {
    "softmax": (lambda x: (x.softmax(-1), x.softmax(0), x.log_softmax(1)), (BATCH,)),
    "sums and means": (
        lambda x: (x.sum(), x.sum((0, 2)), x.mean(1, keepdim=True), x.mean(), x.var(1), x.std()),
        (BATCH,),
    ),
    "variances": (
        lambda x: (x.var(correction=0), *torch.var_mean(x, 2), x.var((0, 1), keepdim=True)),
        (BATCH,),
    ),
    "rearrangements": (
        lambda x, y: (
            x.permute(2, 0, 1) * 2,
            torch.cat([x, y.mT[:, :3]], 1),
            *x.split([1, 2], 1),
            x[:, :1].expand(2, 6, 4).exp(),
            x.flatten(1).exp(),
        ),
        (BATCH, OTHER),
    ),
    "where of equal shapes": (
        lambda m, x, y: torch.where(m, x, y),
        (mask(3, 4), A, A.flip(0)),
    ),
    "embedding": (
        lambda w, i: functional.embedding(i, w),
        (A, torch.tensor([[0, 2, 2], [1, 0, 2]])),
    ),
    "losses of classes": (
        lambda x, t: (
            functional.cross_entropy(x, t),
            functional.cross_entropy(
                x, t, x.new_tensor([1, 2, 3, 4]), reduction="sum", label_smoothing=0.1
            ),
            functional.cross_entropy(x, t, ignore_index=3, reduction="none"),
            functional.cross_entropy(x, x.softmax(1)),
            functional.nll_loss(x.log_softmax(1), t),
        ),
        (A, TARGET),
    ),
    "losses of values": (
        lambda x, y: (
            functional.mse_loss(x, y),
            functional.l1_loss(x, y),
            functional.smooth_l1_loss(x, y, beta=0.5),
            functional.huber_loss(x, y, reduction="sum"),
            functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
            functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
            functional.binary_cross_entropy_with_logits(
                x, y.sigmoid(), pos_weight=torch.arange(4) + 0.5
            ),
            functional.cosine_similarity(x, y),
        ),
        (A, A.flip(0) * 2),
    ),
}
