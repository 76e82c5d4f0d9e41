"""DispatchKernels: products of views are exact, with copies only for operands that need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
from tvm import relax

from tests.relax_helpers import CompiledFunctions, apply_pass, build_main
from tvmbridge.kernels.matmul import MATMUL
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels

op = relax.op
Formula = Callable[..., Any]


def permuted(*axes: int) -> Formula:
    return lambda x: op.permute_dims(x, axes) if isinstance(x, relax.Expr) else x.permute(axes)


def reshaped(*shape: int) -> Formula:
    return lambda x: op.reshape(x, shape) if isinstance(x, relax.Expr) else x.reshape(shape)


def chain(*steps: Formula) -> Formula:
    def apply(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return apply


def widened(axis: int) -> Formula:
    return lambda x: op.expand_dims(x, axis) if isinstance(x, relax.Expr) else x.unsqueeze(axis)


def same(x: Any) -> Any:
    return x


SWAP, LAST = permuted(1, 0), permuted(0, 2, 1)
HEADS = chain(reshaped(2, 5, 3, 4), permuted(0, 2, 1, 3))
KEYS = chain(reshaped(2, 5, 3, 4), permuted(0, 2, 3, 1))

# By name: shapes of the operands' sources, their views, and whether each view needs a copy.
VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Formula, Formula, tuple[bool, bool]]] = {
    "plain": ((3, 4), (4, 5), same, same, (False, False)),
    "right-transposed": ((3, 4), (5, 4), same, SWAP, (False, False)),
    "left-transposed": ((4, 3), (4, 5), SWAP, same, (False, False)),
    "both-transposed": ((4, 3), (5, 4), SWAP, SWAP, (False, False)),
    "transposed-twice": ((3, 4), (4, 5), chain(SWAP, SWAP), same, (False, False)),
    "row-column": ((1, 4), (4, 1), same, same, (False, False)),
    "row-column-transposed": ((4, 1), (1, 4), SWAP, SWAP, (False, False)),
    "column-row": ((4, 1), (1, 4), same, same, (False, False)),
    "column-row-transposed": ((1, 4), (4, 1), SWAP, SWAP, (False, False)),
    "one": ((1, 1), (1, 1), SWAP, SWAP, (False, False)),
    "batch": ((2, 3, 4), (2, 4, 5), same, same, (False, False)),
    "batch-transposed": ((2, 4, 3), (2, 5, 4), LAST, LAST, (False, False)),
    "batch-of-one": ((1, 4, 3), (4, 5), LAST, reshaped(1, 4, 5), (False, False)),
    "batch-inside": ((3, 2, 4), (4, 2, 5), permuted(1, 0, 2), permuted(1, 0, 2), (False, False)),
    "heads": ((10, 12), (10, 12), HEADS, KEYS, (True, True)),
    "heads-of-one-batch": (
        (5, 12),
        (5, 12),
        chain(reshaped(1, 5, 3, 4), permuted(0, 2, 1, 3)),
        chain(reshaped(1, 5, 3, 4), permuted(0, 2, 3, 1)),
        (False, False),
    ),
    "four-dimensions": ((2, 3, 4, 5), (2, 3, 5, 2), same, same, (False, False)),
    "four-transposed": (
        (2, 3, 5, 4),
        (2, 3, 2, 5),
        permuted(0, 1, 3, 2),
        permuted(0, 1, 3, 2),
        (False, False),
    ),
    "five-dimensions": ((2, 1, 3, 4, 5), (2, 1, 3, 5, 2), same, same, (False, False)),
    "reshape-of-a-transpose": (
        (2, 3, 4),
        (12, 5),
        chain(permuted(0, 2, 1), reshaped(2, 12)),
        same,
        (True, False),
    ),
    "reshape-of-a-transpose-of-a-reshape": (
        (6, 4),
        (8, 5),
        chain(reshaped(2, 3, 4), permuted(1, 0, 2), reshaped(3, 8)),
        same,
        (True, False),
    ),
    "transpose-behind-a-copy": (
        (2, 3, 4),
        (2, 5),
        chain(permuted(0, 2, 1), reshaped(2, 12), SWAP),
        same,
        (True, False),
    ),
    "new-dimensions": ((4,), (4,), widened(0), widened(1), (False, False)),
    "new-dimension-transposed": ((4,), (4,), chain(widened(1), SWAP), widened(-1), (False, False)),
    "merged": ((2, 3, 4), (4, 5), reshaped(6, 4), same, (False, False)),
}


def product_of(name: str, dtype: torch.dtype) -> tuple[tvm.IRModule, list[torch.Tensor]]:
    left, right, of_left, of_right, _ = VIEWS[name]
    inputs = [torch.randn(left).to(dtype), torch.randn(right).to(dtype)]
    mod = build_main(inputs, lambda a, b: op.matmul(of_left(a), of_right(b)))
    return mod, inputs


@pytest.fixture(scope="module")
def products() -> tuple[CompiledFunctions, dict[str, list[torch.Tensor]]]:
    """Compile all products of :data:`VIEWS` into one executable; return it and their inputs."""
    functions, inputs = {}, {}
    for number, name in enumerate(VIEWS):
        mod, inputs[name] = product_of(name, torch.float64)
        symbol = f"product_{number}"
        functions[symbol] = mod["main"].with_attr("global_symbol", symbol)
    return CompiledFunctions(tvm.IRModule(functions)), inputs


@pytest.mark.parametrize("name", VIEWS)
def test_agrees_with_pytorch_in_float64(
    name: str, products: tuple[CompiledFunctions, dict[str, list[torch.Tensor]]]
) -> None:
    run, inputs = products
    a, b = inputs[name]
    _, _, of_left, of_right, _ = VIEWS[name]
    (result,) = run(f"product_{list(VIEWS).index(name)}", a, b)
    torch.testing.assert_close(result, of_left(a) @ of_right(b), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", VIEWS)
def test_reads_the_source_where_a_view_of_it_exists(name: str) -> None:
    mod, _ = product_of(name, torch.float32)
    after, report = apply_pass(DispatchKernels(), mod)
    assert (report.rewrites, report.declined) == (1, [])
    calls = [b.value for b in after["main"].body.blocks[0].bindings]
    (product,) = [
        c.args[1].fields
        for c in calls
        if isinstance(c, relax.Call) and getattr(c.args[0], "global_symbol", "") == MATMUL
    ]
    copied = tuple(operand not in set(after["main"].params) for operand in product[1:])
    assert copied == VIEWS[name][-1]
