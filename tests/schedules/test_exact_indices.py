"""Indices of shifted positions, which our lowering keeps exact and TVM's own gets wrong."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import te

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.backends import resolve_target
from tvmbridge.compiler.build import COMPILER_CONFIG
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.schedules.exact_indices import with_exact_indices

ROWS, COLUMNS, WIDTH = 2, 10, 8
ALL = ROWS * COLUMNS


def _shifted(row: int, column: int) -> tvm.tirx.PrimFunc:
    """Return a function whose row index is shifted by ``row`` and column index by ``column``."""
    source = te.placeholder((ROWS, COLUMNS, WIDTH), "float32", name="source")

    def read(at: Any, k: Any) -> Any:
        return source[(at + row) % ALL // COLUMNS, (at + column) % COLUMNS, k] * 2

    result = te.compute((ALL, WIDTH), read, name="result")
    return te.create_prim_func([source, result], index_dtype_override="int64")


def test_positions_are_read_where_they_are() -> None:
    shifts = [(1, 0), (0, 1), (3, 0), (7, 2), (0, 0)]
    names = [f"shifted_{row}_{column}" for row, column in shifts]
    functions = {
        name: _shifted(*shift).with_attr("global_symbol", name)
        for name, shift in zip(names, shifts, strict=True)
    }
    target = resolve_target(None)
    with target, tvm.transform.PassContext(config=COMPILER_CONFIG):
        mod = tvm.IRModule(functions)
        libraries = [
            tvm.compile(with_exact_indices(m), target=target)
            for m in (mod, schedule_for_cpu(mod, target))
        ]
    source = np.random.default_rng(0).normal(size=(ROWS, COLUMNS, WIDTH)).astype("float32")
    at = np.arange(ALL)
    for name, (row, column) in zip(names, shifts, strict=True):
        expected = source[(at + row) % ALL // COLUMNS, (at + column) % COLUMNS] * 2
        for library in libraries:
            found = tvm.runtime.empty((ALL, WIDTH), "float32")
            library[name](tvm.runtime.tensor(source), found)
            np.testing.assert_array_equal(found.numpy(), expected, err_msg=name)


def test_functions_without_quotients_stay_as_they_are() -> None:
    source = te.placeholder((4, 4), "float32")
    copied = te.compute((4, 4), lambda i, j: source[j, i])
    mod = tvm.IRModule({"copied": te.create_prim_func([source, copied])})
    assert tvm_ffi.structural_equal(with_exact_indices(mod), mod)


class Pooled(nn.Module):
    """A module that pools a sequence shifted by one, as funnel transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x * self.weight)
        y = torch.cat([y[:, :1], y[:, :-1]], dim=1)
        return nn.functional.avg_pool2d(y[:, None], (2, 1), (2, 1), ceil_mode=True)[:, 0]


def test_gradient_of_a_shifted_sequence() -> None:
    x, ct = torch.randn(2, 10, 32), torch.randn(2, 5, 32)
    plain = Pooled().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), x, options=CompileOptions(joint="aot"))
    found, expected = (torch.autograd.grad(m(x), list(m.parameters()), ct) for m in (module, plain))
    torch.testing.assert_close(found, expected)
    assert dispatch_report(module).tvm_calls == 1
