"""Expressions over long rows, whose results are sums of many elements."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.conformance.expressions import Expression

# Expressions of one tensor (rows, columns).
LONG: tuple[Expression, ...] = (
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(-1),
    lambda x: x.mean(0),
    lambda x: (x.mean(-1), x.sum(-1), x.std(-1), x.norm(dim=-1)),
    lambda x: x.logsumexp(-1),
    lambda x: x.cumsum(-1),
    lambda x: x.cummax(-1)[0],
    lambda x: functional.layer_norm(x, x.shape[1:]),
    lambda x: functional.rms_norm(x, x.shape[1:]),
    lambda x: functional.group_norm(x[None], 2),
    lambda x: functional.batch_norm(x.t(), None, None, training=True),
    lambda x: functional.normalize(x),
    lambda x: functional.avg_pool1d(x, 64),
    lambda x: functional.interpolate(x[None], scale_factor=0.3, mode="linear"),
    lambda x: functional.gelu(x) + functional.silu(x),
    lambda x: x @ x.t(),
)

# Expressions of two such tensors.
LONG_PAIRS: tuple[Expression, ...] = (
    lambda x, y: functional.mse_loss(x, y, reduction="sum"),
    lambda x, y: functional.cosine_similarity(x, y),
    lambda x, y: functional.cross_entropy(x, y.softmax(-1), reduction="none"),
    lambda x, y: functional.linear(x, y, y[:, 0]),
    lambda x, y: torch.einsum("ik,jk->ij", x, y),
    lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], x[None]),
    lambda x, y: x[:, :4].scatter_add(1, (y > 0).long(), x),
    lambda x, y: x[:, :4].index_add(1, (y[0] > 0).long(), x),
    lambda x, y: x[:, :4].gather(1, (y > 0).long()),
    lambda x, y: x[0] * y + x[1],
)
