"""Concatenations fused with other operators: results equal eager's, and copies use vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op

from tests.legalize.compiled import build_module, fuse, run_all, target
from tvmbridge.core.decisions import recorded_decisions, repeated_decisions
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.symbolic.generalize import generalize
from tvmbridge.symbolic.sizes import Sizes

Graph = Callable[..., relax.Expr]


def _scheduled(shapes: Sequence[tuple[int, ...]], graph: Graph) -> tvm.IRModule:
    mod = build_module(graph, tuple(torch.empty(shape) for shape in shapes))
    return schedule_for_cpu(fuse(mod), target())


def _run(mod: tvm.IRModule, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return relax.VirtualMachine(tvm.compile(mod, target()), tvm.cpu())["main"](*tensors)


def _stores_outside_of_vectors(mod: tvm.IRModule) -> int:
    """Return the number of stores outside of vectorized loops."""
    (func,) = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    stores, in_vectors = [], []

    def look(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.VECTORIZED:
            tvm_ffi.structural_walk(loop.body, (tirx.BufferStore, in_vectors.append))

    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, stores.append))
    tvm_ffi.structural_walk(func.body, (tirx.For, look))
    return len(stores) - len(in_vectors)


def _heads(*pieces: relax.Expr) -> relax.Expr:
    flat = [op.reshape(op.permute_dims(p, [0, 2, 1, 3]), (10, 96)) for p in pieces]
    return op.concat(flat, 1)


def _halves(x: relax.Expr, c: relax.Expr, s: relax.Expr) -> relax.Expr:
    left, right = (relax.TupleGetItem(op.split(x, 2, 3), i) for i in range(2))
    turned = op.concat([op.negative(right), left], 3)
    return op.add(op.multiply(x, c), op.multiply(turned, s))


def _turned(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, 3)
    return x * c + torch.cat([-right, left], 3) * s


def test_transposed_pieces_are_copied_in_vectors() -> None:
    shape = (2, 3, 5, 32)
    mod = _scheduled([shape] * 3, _heads)
    assert _stores_outside_of_vectors(mod) == 0
    tensors = [torch.randn(shape) for _ in range(3)]
    expected = torch.cat([t.transpose(1, 2).reshape(10, 96) for t in tensors], 1)
    assert torch.equal(_run(mod, tensors), expected)


@pytest.mark.parametrize("width", [64, 48, 30, 6])
def test_halves_of_a_row_exchanged(width: int) -> None:
    shapes = [(2, 3, 5, width), (5, width), (5, width)]
    mod = _scheduled(shapes, _halves)
    if width >= 32:
        assert _stores_outside_of_vectors(mod) == 0
    tensors = [torch.randn(shape) for shape in shapes]
    expected = _turned(*(t.double() for t in tensors))
    torch.testing.assert_close(_run(mod, tensors).double(), expected, rtol=1e-6, atol=1e-6)


def test_pieces_of_narrow_heads_have_one_code_for_any_size() -> None:
    """The offsets in a piece are simplified in one way, whatever the batch and the length are."""

    def at(batch: int, length: int) -> tvm.IRModule:
        def joined(q: relax.Expr, k: relax.Expr, c: relax.Expr, s: relax.Expr) -> relax.Expr:
            pieces = [(_halves(q, c, s), 32), (k, 16), (op.exp(k), 16)]
            flat = [(op.permute_dims(t, [0, 2, 1, 3]), width) for t, width in pieces]
            return op.concat([op.reshape(t, (batch * length, n)) for t, n in flat], 1)

        heads = [(batch, 4, length, 8), (batch, 2, length, 8)]
        return _scheduled([*heads, (length, 8), (length, 8)], joined)

    points = ((23, 59), (463, 439), (463, 2), (2, 439), (2, 2))
    with recorded_decisions() as decisions:
        mods = [at(*points[0])]
    for point in points[1:]:
        with repeated_decisions(decisions):
            mods.append(at(*point))
    assert generalize(mods, Sizes(points)) is not None


def test_pieces_of_any_width() -> None:
    cases = [
        [torch.randn(6, width) for width in widths]
        for widths in ((16, 48, 8), (7, 9, 5), (64, 64), (1, 63))
    ]
    results = run_all(*((lambda *p: op.exp(op.concat(list(p), 1)), *pieces) for pieces in cases))
    for pieces, result in zip(cases, results, strict=True):
        expected = torch.cat([t.double() for t in pieces], 1).exp()
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


def test_what_is_read_above_a_concatenation_is_not_repeated() -> None:
    # exp of each piece is computed as the piece is copied, without a buffer.
    def build(*pieces: relax.Expr) -> relax.Expr:
        return op.concat([op.exp(p) for p in pieces], 1)

    mod = _scheduled([(4, 32), (4, 32)], build)
    tensors = [torch.randn(4, 32), torch.randn(4, 32)]
    expected = torch.cat([t.double().exp() for t in tensors], 1)
    torch.testing.assert_close(_run(mod, tensors).double(), expected, rtol=1e-6, atol=1e-6)


def _long(x: relax.Expr) -> relax.Expr:
    return op.exp(op.tanh(op.exp(op.tanh(x))))


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 4), 1), ((8, 64), 1), ((8, 64), 0)], ids=["few", "columns", "rows"]
)
def test_long_computations_are_no_single_expressions(shape: tuple[int, int], axis: int) -> None:
    """TVM's simplifier takes twice as long for each variable that an expression binds."""
    x = torch.randn(shape)
    mod = _scheduled(
        [shape], lambda x: op.tanh(op.concat([_long(x), x, _long(op.negative(x))], axis))
    )
    lets: list[tirx.Let] = []
    for _, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func.body, (tirx.Let, lets.append))
    assert len(lets) < 40
    exact = x.double()
    pieces = [exact.tanh().exp().tanh().exp(), exact, (-exact).tanh().exp().tanh().exp()]
    expected = torch.cat(pieces, axis).tanh()
    torch.testing.assert_close(_run(mod, [x]).double(), expected, rtol=1e-6, atol=1e-6)
