"""The gradient of rotary embeddings, which swap halves of a dimension, in emulated GPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import apply_pass, build_main
from tests.schedules.gpu.emulator import run_module
from tvmbridge.kernels.aten_call import call_overload
from tvmbridge.legalize.aten import FOR_GPUS
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls


@pytest.mark.parametrize(("start", "end", "step"), [(0, 8, 1), (8, None, 1), (3, 15, 4)])
def test_slices_are_put_back(start: int, end: Any, step: int) -> None:
    whole = torch.randn(2, 4, 16)
    part = torch.randn(2, 4, len(range(16)[start:end:step]))

    def graph(p: relax.Expr, w: relax.Expr) -> relax.Expr:
        emit = relax.BlockBuilder.current().emit
        zeros = emit(op.full((2, 4, 16), relax.const(0.0, "float32"), "float32"))
        given = [{"tensor": 0}, {"tensor": 1}, 2, start, 1 << 62 if end is None else end, step]
        type_ = relax.TensorType([2, 4, 16], "float32")
        put = call_overload("aten.slice_scatter.default", given, [zeros, p], type_, compiled=True)
        return op.add(op.multiply(emit(put), w), w)

    mod, report = apply_pass(CompileAtenCalls(FOR_GPUS), build_main([part, whole], graph))
    assert report.rewrites == 1
    (found,) = run_module(mod, part, whole)
    expected = torch.zeros(2, 4, 16)
    expected[..., start:end:step] = part
    torch.testing.assert_close(found, expected * whole + whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unaligned_rows_are_padded_and_cut(dtype: torch.dtype) -> None:
    def graph(x: relax.Expr, wide: relax.Expr) -> list[relax.Expr]:
        return [op.nn.pad(x, [0, 3, 0, 5]), op.strided_slice(wide, [0, 1], [0, 0], [32, 11])]

    x, wide = torch.randn(33, 11).to(dtype), torch.randn(33, 16).to(dtype)
    padded, cut = run_module(build_main([x, wide], graph), x, wide)
    assert torch.equal(padded, torch.nn.functional.pad(x, (0, 5, 0, 3)))
    assert torch.equal(cut, wide[:32, :11])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_computed_image_is_padded(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")

    def graph(x: relax.Expr) -> relax.Expr:
        emit = relax.BlockBuilder.current().emit
        zero = relax.const(0.0, name)
        image = emit(op.multiply(x, emit(op.sigmoid(x))))
        wide = emit(op.concat([image, emit(op.full((2, 5, 1, 16), zero, name))], 2))
        edge = emit(op.full((2, 1, 8, 16), zero, name))
        return op.negative(emit(op.concat([edge, wide, edge], 1)))

    x = torch.randn(2, 5, 7, 16).to(dtype)
    (found,) = run_module(build_main([x], graph), x)
    expected = -torch.nn.functional.pad(x * x.sigmoid(), (0, 0, 0, 1, 1, 1))
    torch.testing.assert_close(found, expected)


def test_each_part_of_a_concatenation_may_be_computed() -> None:
    def graph(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        emit = relax.BlockBuilder.current().emit
        parts = [op.exp(x), op.add(y, y), op.tanh(x)]
        return op.sqrt(emit(op.concat([emit(p) for p in parts], 1)))

    x, y = torch.rand(3, 8), torch.rand(3, 5)
    (found,) = run_module(build_main([x, y], graph), x, y)
    expected = torch.cat([x.exp(), y + y, x.tanh()], 1).sqrt()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


ROLLS: list[tuple[list[int], list[int]]] = [
    ([-3, 2], [1, 2]),
    ([5, -7, 15], [-1, 1, 1]),
    ([29], []),
    ([0], [0]),
]


def test_rolls() -> None:
    given = [torch.randn(2, 7, 6, 8).bfloat16() for _ in ROLLS]

    def graph(*values: relax.Expr) -> list[relax.Expr]:
        type_, made = relax.TensorType([2, 7, 6, 8], "bfloat16"), []
        for v, (shifts, dims) in zip(values, ROLLS, strict=True):
            args = [{"tensor": 0}, shifts, dims]
            rolled = call_overload("aten.roll.default", args, [v], type_, compiled=True)
            rolled = relax.BlockBuilder.current().emit(rolled)
            made.append(op.permute_dims(op.reshape(rolled, (2, 7, 2, 3, 8)), [0, 2, 1, 3, 4]))
        return made

    mod, report = apply_pass(CompileAtenCalls(FOR_GPUS), build_main(given, graph))
    assert report.rewrites == len(ROLLS)
    for x, (shifts, dims), found in zip(given, ROLLS, run_module(mod, *given), strict=True):
        expected = x.roll(shifts, dims).reshape(2, 7, 2, 3, 8).permute(0, 2, 1, 3, 4)
        assert torch.equal(found, expected), (shifts, dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_pieces_are_concatenated(dtype: torch.dtype) -> None:
    """Check that each piece is read within its bounds alone, also in choices within choices."""

    def graph(*pieces: relax.Expr) -> relax.Expr:
        emit = relax.BlockBuilder.current().emit
        made = [emit(op.multiply(x, emit(op.sigmoid(x)))) for x in pieces]
        whole = emit(op.concat([made[0], made[1], made[0], made[2]], 3))
        return op.nn.relu(emit(op.concat([whole, op.negative(whole), whole], 0)))

    given = [torch.randn(2, 3, 5, n).to(dtype) for n in (35, 48, 8)]
    (found,) = run_module(build_main(given, graph), *given)
    made = [x.double() * x.double().sigmoid() for x in given]
    whole = torch.cat([made[0], made[1], made[0], made[2]], 3)
    wanted = torch.cat([whole, -whole, whole]).relu()
    torch.testing.assert_close(found.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
