"""Cases that other importers or TVM's own operators get wrong: each result equals eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from tests.frontend.helpers import INF, NAN, Cases, Together, numbers, special

X = numbers(4, 5, 6)
INTS = torch.arange(-6, 6).reshape(3, 4)
MASK = INTS > 0

INDEXING: Cases = {
    "select of the last": (lambda x: (x[-1], x[:, -1], x[..., -2]), (X,)),
    "negative index tensors": (lambda x, i: (x[i], x[:, i]), (X, torch.tensor([-1, 0, -2]))),
    "negative take": (lambda x, i: torch.take(x, i), (X, torch.tensor([-1, 0, -7]))),
    "mixed advanced indexing": (lambda x: x[:, [0, 1], [1, 2]], (X,)),
    "advanced indices apart": (lambda x: x[[0, 1], :, [1, 2]], (X,)),
    "boolean masks of rows": (
        lambda x, m: torch.where(m[:, None, None], x, 0.0),
        (X, X[:, 0, 0] > 0),
    ),
    "negative starts and ends": (lambda x: (x[-3:-1], x[:, -4:], x[:, :, :-5]), (X,)),
    "steps": (lambda x: (x[::2], x[:, 1::3], x[:, :, -5:-1:2]), (X,)),
    "starts beyond the end": (lambda x: (x[9:], x[:, 2:2], x[:, 3:1]), (X,)),
    "narrow": (lambda x: x.narrow(1, 1, 3) + x.narrow(-2, -3, 3), (X,)),
    "gather": (lambda x, i: x.gather(0, i), (X[0], torch.tensor([[1, 0, 3, 2, 1, 4]]))),
    "index_select": (lambda x, i: x.index_select(-1, i), (X, torch.tensor([5, 0, 0]))),
    "uneven split": (lambda x: torch.split(x, [1, 3, 1], 1), (X,)),
    "split of a dimension in the front": (lambda x: torch.split(x, [1, 3]), (X,)),
    "chunk": (lambda x: x.chunk(4, -1), (X,)),
    "roll and flip": (lambda x: (x.roll(2, -1), x.flip(0, -1), x[0, 0].flip(0)), (X,)),
    "index_put": (lambda x, i: x.index_put((i,), x[0] * 0 + 1), (X, torch.tensor([1, -1]))),
    "scatter": (lambda x, i: x.scatter(0, i, 9.0), (X[0], torch.tensor([[1, 0, 3, 2, 1, 4]]))),
    "cat of mixed dtypes": (
        lambda a, b: torch.cat([a, b, a > 0], -1),
        (X[0], torch.ones(5, 2).long()),
    ),
    "stack of mixed dtypes": (lambda a, b: torch.stack([a, b], 1), (INTS, INTS.float())),
    "tril and triu": (lambda x: (x.tril(-1), x.triu(1)), (X,)),
    "pad": (lambda x: functional.pad(x, (1, -1, 0, 2), value=3.0), (X,)),
    "one column": (lambda x: x[:, :1].expand(4, 3, 6) + 1, (X,)),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="ij"), (X[0, 0], X[0, :, 0])),
    "unbind": (lambda x: x.unbind(1), (X,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (X,)),
}

PROMOTION: Cases = {
    "arange divided": (lambda i: (i / 4, torch.arange(4) / 4), (INTS,)),
    "bool times float": (lambda x: (x > 0) * 2.5, (X,)),
    "int compared with float": (lambda i: (i < 1.5, i == 0.5, i >= -1.5), (INTS,)),
    "count divided": (lambda m: (m.sum() / 2, m.sum(0) / 2), (MASK,)),
    "int clamped": (lambda i: (i.clamp(-1, 2), i.clamp(-1.5, 2.5), i.clamp(min=0)), (INTS,)),
    "reciprocal of int": (lambda i: i.reciprocal(), (INTS * 2 + 1,)),
    "alpha": (
        lambda a, b: (
            torch.add(a, b, alpha=2),
            torch.sub(a, b, alpha=-3),
            torch.rsub(a, b, alpha=2),
            a.clone().add_(b, alpha=0.5),
        ),
        (X, X * 2),
    ),
    "alpha of ints": (lambda a, b: torch.add(a, b, alpha=-2), (INTS, INTS * 3)),
    "float with 0-d double": (lambda x, s: (x + s, x * s, x > s), (X, torch.tensor(1.1).double())),
    "half with 0-d float": (lambda x, s: (x + s, x * s), (X.half(), torch.tensor(1.1))),
    "0-d int with float": (lambda x, s: (x / s, s * x, s - x), (X, torch.tensor(3))),
    "int with 0-d float": (lambda i, s: (i + s, i * s, i / s), (INTS, torch.tensor(1.5))),
    "uint8 wraps": (
        lambda a: (a + a, a * 3, -a, a - 200),
        (torch.arange(100, 228).to(torch.uint8),),
    ),
    "int8 wraps": (lambda a: (a + a, a * 3, a.abs()), (torch.arange(-128, 127).to(torch.int8),)),
    "int32 cumsum and prod": (lambda i: (i.cumsum(0), i.prod(), i.sum()), (INTS.int(),)),
    "bool sums": (lambda m: (m.sum(), m.cumsum(1), m.any(0), m.all(), m.prod()), (MASK,)),
    "any of numbers": (lambda i, x: (i.any(0), i.all(1), x.any(), x.all(-1)), (INTS, X)),
    "where with scalars": (
        lambda m, i: (torch.where(m, i, 0), torch.where(m, 1.5, i), torch.where(m, 1, 2.0)),
        (MASK, INTS),
    ),
    "where of mixed dtypes": (lambda m, i: torch.where(m, i, i * 0.5), (MASK, INTS)),
    "masked_fill": (
        lambda x, m: (x.masked_fill(m, -INF), x.masked_fill(m, torch.tensor(2.0))),
        (INTS.float(), MASK),
    ),
    "int powers": (lambda i: (i**2, i**3, 2.0**i, i.float() ** 0.5), (INTS,)),
    "float to int": (lambda x: (x.long(), (x * 3).int(), x.to(torch.uint8) > 0), (X.abs(),)),
    "floor_divide": (
        lambda a, b: (a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")),
        (INTS, INTS.flip(0) * 2 + 1),
    ),
    "floor_divide of floats": (
        lambda a, b: (a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")),
        (X, X.flip(0)),
    ),
    "bitwise of ints": (lambda a: (a & 3, a | 8, a ^ 5, ~a, a << 2, a >> 1), (INTS,)),
    "logic of numbers": (
        lambda a, x: (torch.logical_not(a), torch.logical_and(a, x)),
        (INTS, INTS / 2),
    ),
    "comparison of bools": (lambda m: (m == ~m, m < ~m, m != True), (MASK,)),  # noqa: E712
    "softmax to double": (lambda x: x.softmax(-1, dtype=torch.float64), (X,)),
    "sum to double": (lambda x: (x.sum(0, dtype=torch.float64), x.mean(dtype=torch.float64)), (X,)),
    "zeros_like of another dtype": (lambda x: torch.zeros_like(x, dtype=torch.int32), (X,)),
    "large ints": (
        lambda i: (i + 1, i * 3 - i, i // 3),
        (torch.tensor([2**53 + 1, -(2**53) - 1]),),
    ),
}

NOT_A_NUMBER: Cases = {
    "product with zero": (lambda x: (x * 0, 0.0 * x, 0 / x, x * torch.zeros(16)), (special(),)),
    "relu": (
        lambda x: (x.relu(), functional.relu6(x), functional.leaky_relu(x, 0.1)),
        (special(),),
    ),
    "clamp": (lambda x: (x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0)), (special(),)),
    "overflow before a difference": (
        lambda x: torch.exp(x) - 3e38,
        (torch.tensor([88.7, 88.722831, 88.72284, 89.0, 100.0, -NAN] * 8),),
    ),
    "clamp by nan": (lambda x: (x.clamp(min=NAN), x.clamp_max(NAN)), (special(),)),
    "clamp by tensors": (lambda x: x.clamp(-x.abs(), x.flip(0)), (special(),)),
    "hardtanh": (lambda x: (functional.hardtanh(x), functional.hardsigmoid(x)), (special(),)),
    "hardswish": (lambda x: (functional.hardswish(x), functional.elu(x)), (special(),)),
    "softplus": (lambda x: (functional.softplus(x), functional.softplus(x, 2, 3)), (special(),)),
    "maximum": (
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)),
        (special(), special().flip(0)),
    ),
    "fmax": (lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), (special(), special().flip(0))),
    "max": (lambda x: (x.max(), x.amax(), x.amin(0), x.max(0), x.min(0)), (special(),)),
    "argmax": (lambda x: (x.argmax(), x.argmin(), x.sort(), x.topk(3)), (special(),)),
    "ties": (lambda x: (x.argmax(1), x.max(1), x.argmin(0)), (torch.ones(3, 4),)),
    "x != x": (lambda x: (x != x, x == x, x.isnan(), x.isinf(), x.isfinite()), (special(),)),
    "x != copy": (
        lambda x: (x != x.clone(), (x + 0) == x, x.ne(x.view(4, 4).view(16))),
        (special(),),
    ),
    "minus itself": (lambda x: (x - x, x / x, x + (-x), x - x.clone()), (special(),)),
    "times zeros_like": (
        lambda x: (torch.zeros_like(x) * x, torch.zeros_like(x) / x),
        (special(),),
    ),
    "negated comparisons": (
        lambda x, y: (~(x < y), ~(x <= y), ~(x > y), ~(x == y), torch.logical_not(x >= y)),
        (special(), special().flip(0)),
    ),
    "conditions combined": (
        lambda x, y: ((x < y) | (x >= y), (x < y) & (x >= y), torch.where(~(x < y), x, y)),
        (special(), special().flip(0)),
    ),
    "choice of equals": (lambda x: torch.where(x == x, x, -x), (special(),)),
    "signs": (lambda x: (x.sign(), x.sgn(), torch.copysign(x, -x), x.abs(), -x), (special(),)),
    "rounding": (lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac()), (special(),)),
    "reductions": (lambda x: (x.sum(), x.mean(), x.prod(), x.var(), x.std()), (special(),)),
    "softmax of halves": (
        lambda x, y: (x.softmax(-1), y.log_softmax(0), x.softmax(1).log_softmax(-1)),
        (X.bfloat16(), X.half()),
    ),
    "softmax": (
        lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)),
        (torch.stack([special(), special().nan_to_num(), torch.full((16,), -INF)]),),
    ),
    "softmax that underflows": (
        lambda x: (x.softmax(-1), -(x.softmax(-1) * x.softmax(-1).log()).sum(-1)),
        (torch.tensor([[0.0, -88.0, -95.0, -103.0, -104.5, -200.0, -INF, -1.0]] * 2),),
    ),
    "elu of alpha 0": (lambda x: functional.elu(x, 0.0), (special(),)),
    "functions": (
        lambda x: (x.exp(), x.tanh(), x.sigmoid(), x.erf(), x.sin(), x.log(), x.sqrt(), x.rsqrt()),
        (special(),),
    ),
    "activations": (lambda x: (functional.silu(x), functional.mish(x)), (special(),)),
    # No infinities: eager's gelu of an infinity is NaN or not, depending on the element's position.
    "gelu": (lambda x: functional.gelu(x), (special().nan_to_num(NAN, 1e30, -1e30),)),
    "float64": (
        lambda x: (x.exp(), x.tanh(), x.sigmoid(), x.erf(), x.relu(), x.log(), x != x, x.amax()),
        (special(torch.float64),),
    ),
    "nan_to_num": (lambda x: (x.nan_to_num(), x.nan_to_num(1.0, 2.0, 3.0)), (special(),)),
    "lerp": (
        lambda x: (torch.lerp(x, x.flip(0), 0.3), torch.lerp(x, x.flip(0), 0.7)),
        (special(),),
    ),
    "added and taken away": (lambda x: (x + 1e8) - 1e8, (X,)),
    "scaled twice": (lambda x: (x * 3.0) / 3.0, (X,)),
    "distributed": (lambda x, y: x * y - x * 2.0, (special(), special().flip(0))),
    "power": (lambda x: (x**2, x**3, x**0.5, x**-1, x**-2, x**0, x**1.5), (special(),)),
}

PRECISION: Cases = {
    "log1p near 0": (lambda x: (x.log1p() / x, x.expm1() / x), (torch.logspace(-12, 0, 50),)),
    "tanh near 0": (
        lambda x: (x.tanh() / x, x.erf() / x, x.sin() / x),
        (torch.logspace(-12, 0, 50),),
    ),
    "half sums": (
        lambda x, y: (x.sum(), y.sum(), x.mean(), x.softmax(0), y.cumsum(0)[-1], y.norm()),
        (torch.ones(4096).half(), torch.ones(4096).bfloat16()),
    ),
    "half pools": (
        lambda x: (functional.adaptive_avg_pool2d(x, 1), functional.layer_norm(x, (64,))),
        (numbers(1, 2, 64, 64).bfloat16(),),
    ),
    "half sort": (lambda x: (x.sort(), x.topk(2), x.max(1)), (X[0].bfloat16(),)),
    "long sums": (lambda x: (x.sum(), x.mean()), (torch.ones(2**25),)),
    "double products": (
        lambda a, b: (a @ b, functional.linear(a, b.t()), torch.bmm(a[None], b[None])),
        (numbers(7, 9, dtype=torch.float64), numbers(9, 3, dtype=torch.float64)),
    ),
    "half products": (
        lambda a, b: (a @ b, functional.linear(a, b.t(), b[0]), a.float() @ b.float()),
        (X[0].half(), X[1].half().t()),
    ),
    "bfloat16 products": (
        lambda a, b: (a @ b, functional.linear(a, b.t())),
        (X[0].bfloat16(), X[1].bfloat16().t()),
    ),
    "int products": (lambda a: (a @ a.t(), a.float() @ a.t().float()), (INTS * 2**33,)),
    "double convolution": (
        lambda x, w: (functional.conv2d(x, w), functional.conv2d(x, w, w[:, 0, 0, 0])),
        (numbers(1, 2, 8, 8, dtype=torch.float64), numbers(3, 2, 3, 3, dtype=torch.float64)),
    ),
    "selu": (lambda x: (functional.selu(x), functional.celu(x, 0.5)), (X,)),
    "variance": (
        lambda x: (x.var(), x.var(1, correction=0), x.std(-1), x.var((0, 2))),
        (X + 1000,),
    ),
}

SIZES: Cases = {
    "cumsum of nothing": (lambda x: (x.cumsum(0), x.cumprod(0)), (torch.empty(0),)),
    "nothing": (lambda x: (x + 1, x * x, x.sum(), x.mean(0), x.t(), x.exp()), (torch.empty(0, 3),)),
    "product over nothing": (lambda a, b: a @ b, (torch.empty(2, 0), torch.empty(0, 3))),
    "nothing in the midst": (
        lambda x: torch.cat([x, x[:0], x[:, :0].sum(1)[:, None]]),
        (X[0][:, :1],),
    ),
    "nothing in, nothing out": (lambda x: x, (torch.empty(0, 2),)),
    "empty constants": (
        lambda x: (torch.zeros(0, 3) + 1, torch.cat([x, x.new_ones(0)])),
        (X[0, 0],),
    ),
    "no input": (lambda: (torch.arange(4) / 4, torch.ones(2, dtype=torch.bfloat16)), ()),
    "made here": (lambda x: (x + torch.full((6,), 2).half(), torch.eye(3), x.new_zeros(2)), (X,)),
    "0-d": (
        lambda x: (x + 1, x.sum(), x.softmax(0), x.amax(), x.view(1), x.exp() * x),
        (torch.tensor(1.5),),
    ),
    "0-d results": (lambda x: (x[0, 0, 0], x.sum(), x.sum() > 0, x.argmax()), (X,)),
    "0-d ints": (lambda i: (i + 1, i / 2, i > 0, i.float()), (torch.tensor(3),)),
    "one element": (
        lambda x: (x.sum(0), x.squeeze(), x.mean(), x.expand(3, 1)),
        (torch.ones(1, 1),),
    ),
    "strided input": (lambda x: (x * 2, x.sum(0), x.contiguous()), (X.permute(2, 0, 1)[::2],)),
    "expanded input": (lambda x: (x * 2, x.sum(0)), (torch.ones(1, 4).expand(3, 4),)),
    "unaligned input": (lambda x: (x * 2, x.sum()), (torch.arange(33.0)[1:],)),
    "result is the input": (lambda x: (x, x + 1, x), (X,)),
    "result is a view": (lambda x: (x.view(-1), x[0], x.t() if x.dim() < 3 else x.mT), (X,)),
    "bytes": (lambda x: (x > 0, (x > 0).to(torch.uint8), x.to(torch.int8)), (X.abs(),)),
    "halves out": (lambda x: (x.half(), x.bfloat16(), x.half() * 2, x.bfloat16().exp()), (X,)),
}


def _is_view(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether a result of the function shares memory with an argument."""
    mine = {t.untyped_storage().data_ptr() for t in tensors}
    results = [r for r in pytree.tree_leaves(function(*tensors)) if isinstance(r, torch.Tensor)]
    return any(r.untyped_storage().data_ptr() in mine for r in results)


def computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with copied results: views of an input would need no compiled code."""
    return lambda *tensors: pytree.tree_map(torch.clone, function(*tensors))


TABLES: dict[str, Cases] = {
    "indexing": {name: case for name, case in INDEXING.items() if _is_view(*case)},
    "computed": {name: (computed(f), inputs) for name, (f, inputs) in INDEXING.items()},
    "promotion": PROMOTION,
    "nan": NOT_A_NUMBER,
    "precision": PRECISION,
    "sizes": SIZES,
}
GROUPS = {kind: Together(table) for kind, table in TABLES.items()}


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind}: {name}") for kind in TABLES for name in TABLES[kind]],
)
def test_like_eager(kind: str, name: str) -> None:
    """Check that the compiled function has PyTorch's dtypes, shapes and values."""
    GROUPS[kind].assert_like_eager(name)
