"""Modules that other importers refuse or get wrong, beyond single operators: results equal eager's.

Other files have more such cases: ``test_traps.py`` (indexing, promotion, NaN, precision, sizes),
``test_aten_calls.py`` and ``test_compiled.py`` (bounds, windows), ``tests/test_norms.py`` (batch
and instance norm in both modes), ``tests/test_dropout.py`` and
``tests/graph_capture/test_noise.py`` (all kinds of dropout), ``tests/runtime/test_dispatch.py``
and ``tests/runtime/guards/test_state.py`` (writes through views), ``tests/gradients/test_traps.py``
(gradients), ``tests/architectures`` (GPT-2).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.frontend.helpers import Cases, Together

GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


X = numbers(4, 6)
IMAGE = numbers(2, 3, 7, 8)
VOLUME = numbers(1, 2, 5, 4, 3)
GRID = numbers(2, 5, 4, 2).clamp(-1.4, 1.4)
TARGET = torch.tensor([1, 0, -100, 5])
QUERY, KEY = numbers(2, 4, 3, 8), numbers(2, 2, 5, 8)
INDEX = torch.tensor([[0, 1, 2, 0, 1, 3], [3, 0, 0, 1, 2, 2]])

WINDOWS: Cases = {
    "grid_sample": (
        lambda x, g: tuple(
            functional.grid_sample(x, g, mode, padding, align_corners=corners)
            for mode, padding, corners in (
                ("bilinear", "zeros", False),
                ("nearest", "border", True),
                ("bicubic", "reflection", False),
            )
        ),
        (IMAGE, GRID),
    ),
    "max pool with indices": (
        lambda x: functional.max_pool2d(x, 3, 2, 1, return_indices=True),
        (IMAGE,),
    ),
    "average pool with another divisor": (
        lambda x: functional.avg_pool2d(x, 3, 2, 1, False, False, 5),
        (IMAGE,),
    ),
    "average pool with ceil_mode": (
        lambda x: (functional.avg_pool2d(x, 3, 2, 1, True, False), functional.avg_pool2d(x, 2)),
        (IMAGE,),
    ),
    "nearest at ratios that are no integers": (
        lambda x: (
            functional.interpolate(x, size=(5, 11)),
            functional.interpolate(x, scale_factor=1.7),
            functional.interpolate(x, size=(5, 11), mode="nearest-exact"),
        ),
        (IMAGE,),
    ),
    "bilinear by a factor": (
        lambda x: (
            functional.interpolate(x, scale_factor=1.6, mode="bilinear"),
            functional.interpolate(
                x, scale_factor=(0.6, 2.3), mode="bilinear", recompute_scale_factor=True
            ),
        ),
        (IMAGE,),
    ),
    "bicubic, antialiased": (
        lambda x: (
            functional.interpolate(x, size=(4, 5), mode="bilinear", antialias=True),
            functional.interpolate(x, size=(9, 5), mode="bicubic", antialias=True),
        ),
        (IMAGE,),
    ),
    "adaptive max pool": (lambda x: functional.adaptive_max_pool2d(x, (3, 2)), (IMAGE,)),
    "unfold and fold": (
        lambda x: (
            functional.unfold(x, 3, padding=1),
            x.unfold(2, 3, 2),
            functional.fold(functional.unfold(x, 2), (7, 8), 2),
        ),
        (IMAGE,),
    ),
    "convolutions in 1 and 3 dimensions": (
        lambda x, w, v, k: (
            functional.conv1d(x, w, stride=2, padding=1),
            functional.conv3d(v, k, padding=1, dilation=2),
            functional.conv_transpose3d(v, k.transpose(0, 1), stride=2, output_padding=1),
        ),
        (IMAGE[0], numbers(2, 7, 3)[:, :7], VOLUME, numbers(3, 2, 2, 2, 2)),
    ),
    "convolutions in halves": (
        lambda x, w: (functional.conv2d(x, w), functional.conv2d(x.float(), w.float())),
        (IMAGE.bfloat16(), numbers(2, 3, 3, 3).bfloat16()),
    ),
}

LOSSES: Cases = {
    "cross entropy": (
        lambda x, t: (
            functional.cross_entropy(x, t),
            functional.cross_entropy(x, t, reduction="sum", label_smoothing=0.1),
            functional.cross_entropy(x, t.clamp(min=0), reduction="none", ignore_index=0),
            functional.cross_entropy(x, t, x[0].abs(), label_smoothing=0.2),
            functional.cross_entropy(x, x.softmax(1)),
        ),
        (X, TARGET),
    ),
    "cross entropy of classes in the midst": (
        lambda x, t: functional.cross_entropy(x, t, reduction="none"),
        (IMAGE, torch.ones(2, 7, 8).long()),
    ),
    "negative log likelihood": (
        lambda x, t: functional.nll_loss(x.log_softmax(1), t, reduction="sum"),
        (X, TARGET),
    ),
    "other losses": (
        lambda x, y: (
            functional.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].abs()),
            functional.smooth_l1_loss(x, y, beta=0.5),
            functional.huber_loss(x, y, delta=0.7),
            functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
            functional.triplet_margin_loss(x, y, y.flip(0)),
        ),
        (X, X.flip(0) * 2),
    ),
}

ATTENTION: Cases = {
    "a scale of one's own": (
        lambda q, k: functional.scaled_dot_product_attention(q[:, :2], k, k, scale=0.3),
        (QUERY, KEY),
    ),
    "heads in groups": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        (QUERY, KEY),
    ),
    "of matrices": (
        lambda q, k: functional.scaled_dot_product_attention(q[0, 0], k[0, 0], k[0, 1]),
        (QUERY, KEY),
    ),
    "masks of booleans": (
        lambda q, k, m: functional.scaled_dot_product_attention(q[:, :2], k, k, m),
        (QUERY, KEY, torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()),
    ),
    "masks that are added, and causal ones": (
        lambda q, k, m: (
            functional.scaled_dot_product_attention(q[:, :2], k, k, m),
            functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        ),
        (QUERY, KEY, numbers(3, 5)),
    ),
}

NORMS: Cases = {
    "instance norm, another eps": (
        lambda x, w: functional.instance_norm(x, weight=w, bias=-w, eps=0.5),
        (IMAGE, numbers(3)),
    ),
    "batch norm with given statistics": (
        lambda x, m: functional.batch_norm(x, m, m.abs() + 1, m, -m, False, 0.7, 0.2),
        (IMAGE, numbers(3)),
    ),
    "layer norm in float64 and bfloat16": (
        lambda x, y: (functional.layer_norm(x, (6,), eps=0.1), functional.layer_norm(y, (6,))),
        (X.double(), X.bfloat16()),
    ),
    "standard deviations": (
        lambda x: (
            x.std(unbiased=False),
            x.std(0, correction=2),
            *torch.var_mean(x, 1),
            *torch.std_mean(x, 0, keepdim=True),
        ),
        (X,),
    ),
}

MOVES: Cases = {
    "reductions along a dimension": (
        lambda x: (x.prod(1), x.min(0), x.amax((0, 1)), x.logsumexp((0, 1)), x.cummax(0)),
        (X,),
    ),
    "scatter": (
        lambda x, i: (
            x.scatter_add(0, i, x[:2]),
            x.scatter_reduce(0, i, x[:2], "amax"),
            x.scatter_reduce(0, i, x[:2], "mean", include_self=False),
            x.index_reduce(0, i[1, :2], x[:2], "prod"),
        ),
        (X, INDEX),
    ),
    "repeats": (
        lambda x, r: (x.repeat_interleave(2), x.repeat_interleave(r, 0, output_size=7)),
        (X, torch.tensor([1, 3, 0, 3])),
    ),
    "bags of embeddings": (
        lambda i, w: (
            functional.embedding_bag(i, w, mode="sum"),
            functional.embedding_bag(i[0], w, torch.tensor([0, 2, 5]), mode="mean"),
        ),
        (INDEX, X),
    ),
    "sorted, and searched": (
        lambda x: (x.round().sort(dim=1, stable=True), torch.searchsorted(x[0].sort()[0], x)),
        (X,),
    ),
    "distances and products": (
        lambda x: (torch.cdist(x, x[:2] + 1), torch.addmv(x[:, 0], x, x[0], beta=0.5, alpha=2)),
        (X,),
    ),
    "functions": (lambda x: (x.exp2(), x.erfc(), torch.fmin(x, -x)), (X,)),
    "functions of integers": (lambda i: (i.exp(), i.sqrt(), i.sin(), i.sigmoid()), (INDEX,)),
    "index_put with few indices, and masks": (
        lambda x, i, m: (
            x.index_put((i[0, :2],), x[0]),
            x.index_put((i[1, :2], i[0, :2]), x[0, :2], accumulate=True),
            x.index_put((m,), torch.tensor(9.0)),
        ),
        (X, INDEX, X > 0),
    ),
}

TABLES = {
    "windows": WINDOWS,
    "losses": LOSSES,
    "attention": ATTENTION,
    "norms": NORMS,
    "moves": MOVES,
}
GROUPS = {kind: Together(table) for kind, table in TABLES.items()}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in TABLES for n in TABLES[k]])
def test_like_eager(kind: str, name: str) -> None:
    GROUPS[kind].assert_like_eager(name)
