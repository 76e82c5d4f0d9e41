"""Gradients where derivative rules are easily wrong, against PyTorch's autograd.

Each case goes the whole way of the data, by both sources of the joint function where both exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.compare import compare
from tests.conformance.evaluate import Run, Values, run_group
from tests.gradients.cases import integers, mask, normal, special
from tvmbridge.errors import BridgeError

X, Y = normal(3, 4), normal(3, 4, seed=1)
IMAGE = normal(2, 3, 7, 7)
KERNEL = normal(4, 3, 3, 3, seed=2)
ROWS = torch.tensor([2, 0, 2, -1])
TIES = integers(4, 5)

Function = Callable[..., Any]

KINKS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
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
    "where with NaN not chosen": (lambda x: torch.where(x > 0, x.log(), x), (special(),)),
}

TIED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "maximum of equals": (lambda x, y: torch.maximum(x, y), (TIES, TIES.flip(0))),
    "minimum of equals": (lambda x, y: torch.minimum(x, y), (TIES, TIES.flip(0))),
    "amax and amin": (lambda x: (x.amax(1), x.amin(0), x.amax()), (TIES,)),
    "max and min with indices": (lambda x: (x.max(1).values, x.min(0).values), (TIES,)),
    "max of all": (lambda x: x.max() + x.min(), (TIES,)),
    "topk and sort": (lambda x: (x.topk(2).values, x.sort(stable=True).values), (TIES,)),
    "max pool of equals": (lambda x: functional.max_pool2d(x, 2), (TIES[None, None],)),
}

POOLS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
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

MOVES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
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

TABLES = {"kinks": KINKS, "ties": TIED, "pools": POOLS, "moves": MOVES}
NAMES = [(kind, name) for kind, table in TABLES.items() for name in table]

# What TVM's Gradient differentiates; for the others `auto` takes PyTorch's own formulas.
BY_GRADIENT = frozenset(
    {
        "relu at 0",
        "abs at 0",
        "sqrt and rsqrt at 0",
        "where with NaN not chosen",
        "maximum of equals",
        "minimum of equals",
        "amax and amin",
        "batch norm in training",
        "group norm",
        "where of broadcast operands",
        "padding index",
        "triangles",
        "comparisons as factors",
        "read twice, and through a view",
        "a product that broadcasts its batch",
    }
)


def call(function: Function, *inputs: torch.Tensor) -> Any:
    return function(*inputs)


def case_of(kind: str, name: str, dtype: torch.dtype) -> Case:
    """All floating inputs, in ``dtype``, are differentiated."""
    function, inputs = TABLES[kind][name]
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
    leaves, spec = pytree.tree_flatten(((function, *tensors), {}))
    return Case(name, tuple(leaves), spec, tuple(t.is_floating_point() for t in tensors))


@functools.cache
def together(kind: str, joint: str, dtype: torch.dtype) -> dict[str, str | None]:
    """How the gradients of each case differ from eager's, all compiled as one module.

    For ``relax`` those of :data:`BY_GRADIENT`; nothing where the module is refused.
    """
    names = [n for n in TABLES[kind] if joint == "aot" or n in BY_GRADIENT]
    cases = [case_of(kind, name, dtype) for name in names]
    try:
        run = run_group(call, cases, joint, admit=False)
    except BridgeError:
        return {}
    return dict(zip(names, differences(run), strict=True))


def differences(run: Run) -> list[str | None]:
    """How the results and gradients of each case differ from eager's."""
    assert not run.report.fallbacks
    pairs = zip(_by_case(run.ours), _by_case(run.theirs), strict=True)
    return [compare(ours, theirs, values=True) for ours, theirs in pairs]


def _by_case(values: Values) -> list[tuple[Any, Any]]:
    assert values.gradients is not None
    return list(zip(values.results, values.gradients, strict=True))


def _runs() -> Iterator[tuple[str, str, str, torch.dtype]]:
    """Each case by both sources in float64; what may depend on the dtype in float32 too."""
    for kind, name in NAMES:
        for joint in ("relax", "aot") if name in BY_GRADIENT else ("aot",):
            yield kind, name, joint, torch.float64
            if kind in ("kinks", "ties"):
                yield kind, name, joint, torch.float32


@pytest.mark.parametrize(("kind", "name", "joint", "dtype"), list(_runs()))
def test_gradient_is_pytorchs(kind: str, name: str, joint: str, dtype: torch.dtype) -> None:
    found = together(kind, joint, dtype)
    if name in found:
        assert found[name] is None, found[name]
        return
    (difference,) = differences(run_group(call, [case_of(kind, name, dtype)], joint, admit=False))
    assert difference is None, difference
    raise AssertionError("it is right by itself, but not compiled with the others")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_the_source_is_known(kind: str, name: str) -> None:
    """By itself a case has the source that the table says, and the gradients of eager."""
    run = run_group(call, [case_of(kind, name, torch.float64)], "auto", admit=False)
    assert differences(run) == [None]
    (specialization,) = run.report.specializations
    assert specialization.joint == ("relax" if name in BY_GRADIENT else "aot")
