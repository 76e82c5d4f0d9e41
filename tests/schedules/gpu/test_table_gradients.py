"""Emulated gradients of small tables: results equal PyTorch's; the look-ups that use them."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import apply_pass, assert_changes_nothing, build_main
from tests.schedules.gpu.emulator import run_module
from tests.thinned import thinned
from tvmbridge.kernels.aten_call import call_overload
from tvmbridge.passes.relax.table_gradients import TableGradients


def _of_index(values: torch.Tensor, index: torch.Tensor, rows: int, first: float) -> tvm.IRModule:
    """Return a module that adds rows of ``values`` by index to a table filled with ``first``."""
    dtype = str(values.dtype).removeprefix("torch.")
    shape = [rows, *values.shape[index.dim() :]]

    def graph(v: relax.Expr, i: relax.Expr) -> relax.Expr:
        table = relax.BlockBuilder.current().emit(op.full(shape, relax.const(first, dtype), dtype))
        given = [{"tensor": 0}, [{"tensor": 1}], {"tensor": 2}, True]
        type_ = relax.TensorType(shape, dtype)
        return call_overload("aten.index_put.default", given, [table, i, v], type_)

    return build_main([values, index], graph)


@pytest.mark.parametrize(
    ("rows", "row", "places", "dtype"),
    thinned(
        [
            (9, (12,), (40,), torch.float32),
            (3, (34,), (2, 700), torch.float32),  # two blocks a row; indices in parts
            (5, (2, 17), (6, 7), torch.float64),
            (4, (), (3000,), torch.float32),
            (7, (5,), (31,), torch.float16),
        ],
        2,
    ),
)
def test_rows_are_added_up(
    rows: int, row: tuple[int, ...], places: tuple[int, ...], dtype: torch.dtype
) -> None:
    index = torch.randint(-rows, rows, places)
    values = torch.randn(*places, *row).to(dtype)
    mod, report = apply_pass(TableGradients(), _of_index(values, index, rows, 0.0))
    assert report.rewrites == 1
    (found,) = run_module(mod, values, index)
    exact = torch.zeros(rows, *row, dtype=torch.float64)
    exact.index_put_([index], values.double(), accumulate=True)
    bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    assert found.dtype == dtype
    assert (found.double() - exact).norm() < bound * exact.norm()


def test_embeddings() -> None:
    index = torch.randint(0, 6, (50,), dtype=torch.int32)
    values, table = torch.randn(50, 8), torch.randn(6, 8)

    def graph(v: relax.Expr, t: relax.Expr, i: relax.Expr) -> relax.Expr:
        return op.grad.take_backward(v, t, i, axis=0)

    mod, report = apply_pass(TableGradients(), build_main([values, table, index], graph))
    assert report.rewrites == 1
    (found,) = run_module(mod, values, table, index)
    exact = torch.zeros(6, 8, dtype=torch.float64).index_add(0, index, values.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_stays() -> None:
    index = torch.randint(0, 6, (50,))
    values = torch.randn(50, 8)
    assert_changes_nothing(TableGradients(), _of_index(values, index, 6, 1.0))
    assert_changes_nothing(TableGradients(), _of_index(values, index, 1 << 24, 0.0))
    assert_changes_nothing(TableGradients(), _of_index(values.int(), index, 6, 0))
