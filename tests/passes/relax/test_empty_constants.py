"""EmptyConstants: constants without elements become reshapes, which TVM can load from a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

from tests.relax_helpers import apply_pass, assert_changes_nothing, operators
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.empty_constants import EmptyConstants


def _returning(shape: tuple[int, ...], dtype: str) -> tvm.IRModule:
    """Return a module whose function returns a constant of ``shape``, and its argument."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    constant = relax.const(tvm.runtime.empty(shape, dtype), dtype)
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple([constant, x]))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_code_with_an_empty_constant_can_be_kept(dtype: str) -> None:
    after, report = apply_pass(EmptyConstants(), _returning((4, 0), dtype))
    assert report.rewrites == 1
    assert operators(after) == ["relax.reshape"]
    assert_changes_nothing(EmptyConstants(), after)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.so")
        relax.build(after, target="llvm").export_library(str(path))
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        constant, _ = machine["main"](tvm.runtime.empty((2,), "float32"))
    assert (tuple(constant.shape), str(constant.dtype)) == ((4, 0), dtype)


@pytest.mark.parametrize("shape", [(0, 4), (3,), ()])
def test_constants_that_tvm_can_load_stay(shape: tuple[int, ...]) -> None:
    assert_changes_nothing(EmptyConstants(), _returning(shape, "float32"))


class Empty(nn.Module):
    """Has a parameter without elements, whose gradient is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(4, 0))
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ self.weight, x @ self.empty], 1).tanh()


def test_gradients_of_empty_parameters_come_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path))
    caches = []
    for _ in range(2):
        module = add_tvm_dispatch(Empty().train(), torch.ones(3, 4))
        module(torch.ones(3, 4)).sum().backward()
        gradient = module.get_parameter("empty").grad
        assert gradient is not None
        assert gradient.shape == (4, 0)
        caches += [s.cache for s in dispatch_report(module).specializations]
    assert [c.split(":")[0] for c in caches] == ["miss", "hit"]
