"""Matrix products of ``cuda/products.cuh`` and ``cuda/loops.cuh``, run on the host."""

from __future__ import annotations

import pytest
import torch
import tvm
from torch.nn import functional

from tests.schedules.gpu.emulator import EmulatedFunction, compile_for_host, gpu_target, source_of
from tests.thinned import but_slow
from tvmbridge.backends import BACKENDS
from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules.gpu.products import (
    GROUP_TILES,
    TILES,
    GroupTile,
    WarpTile,
    gpu_product,
    group_tile_for,
    tile_for,
)

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def _run(
    functions: dict[str, tvm.tirx.PrimFunc],
    operands: dict[str, list[torch.Tensor]],
    arch: str = "sm_90",
) -> None:
    BACKENDS["cuda"].prepare()
    mod = tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in functions.items()})
    source, lowered = source_of(mod, gpu_target(arch))
    library = compile_for_host(source)
    for name, tensors in operands.items():
        EmulatedFunction(library, lowered[name], 1)(*tensors)


def _operands(form: Form, dtype: str, bias: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [*form.shapes[:2], *([(form.columns,)] if bias else []), form.shapes[2]]
    return [torch.randn(s, generator=generator).to(_DTYPES[dtype]) for s in shapes]


def _expected(form: Form, tensors: list[torch.Tensor], activation: str) -> torch.Tensor:
    left, right, *bias = (t.double() for t in tensors[:-1])
    product = left @ (right.mT if form.right_transposed else right)
    total = product + bias[0] if bias else product
    return _ACTIVATIONS[activation](total)


def _assert_close(form: Form, tensors: list[torch.Tensor], activation: str = "none") -> None:
    result, expected = tensors[-1], _expected(form, tensors, activation)
    eps = torch.finfo(result.dtype).eps
    bound = 2 * eps * expected.abs().clamp(min=1) + 1e-5
    assert ((result.double() - expected).abs() <= bound).all(), (form, activation)


_CASES = [
    (Form(64, 64, 64), "float16", False, "none"),
    (Form(33, 40, 72), "bfloat16", True, "relu"),
    (Form(20, 24, 40, False, True, 2), "float16", False, "none"),
    (Form(17, 13, 21, False, False, 2, True), "float16", True, "silu"),
    (Form(9, 7, 5, False, True), "bfloat16", True, "gelu"),
    (Form(16, 33, 8), "float16", True, "gelu_tanh"),
    (Form(70, 66, 35, False, True, 2), "float32", False, "none"),
    (Form(5, 3, 2, False, False, 3, True), "float32", False, "none"),
]


def test_products_of_all_forms() -> None:
    names = [f"case_{i}" for i in range(len(_CASES))]
    functions = {
        name: gpu_product(form, dtype, bias=bias, activation=activation)
        for name, (form, dtype, bias, activation) in zip(names, _CASES, strict=True)
    }
    operands = {n: _operands(*case[:3]) for n, case in zip(names, _CASES, strict=True)}
    _run(functions, operands)
    for name, (form, _, _, activation) in zip(names, _CASES, strict=True):
        _assert_close(form, operands[name], activation)


@pytest.mark.parametrize("transposed", but_slow([False, True], False))
def test_all_tiles(transposed: bool) -> None:
    form = Form(136, 160, 72, False, transposed)
    functions = {f"tile_{i}": gpu_product(form, "float16", tile=t) for i, t in enumerate(TILES)}
    operands = {name: _operands(form, "float16", False) for name in functions}
    _run(functions, operands)
    for tensors in operands.values():
        _assert_close(form, tensors)


def test_products_of_groups_of_warps() -> None:
    small, large = Form(70, 50, 72, False, True), Form(130, 300, 200, False, True, 2)
    cases = {
        f"tile_{i}": (large if t.columns > 128 else small, t, i % 2 == 0)
        for i, t in enumerate(GROUP_TILES)
    }
    functions, operands = {}, {}
    for name, (form, tile, bias) in cases.items():
        dtype, activation = ("bfloat16", "none") if bias else ("float16", "gelu")
        options = {"bias": bias, "activation": activation, "tile": tile}
        functions[name] = gpu_product(form, dtype, **options)
        operands[name] = _operands(form, dtype, bias)
    _run(functions, operands, arch="sm_90a")
    for name, (form, _, bias) in cases.items():
        _assert_close(form, operands[name], "none" if bias else "gelu")


def test_the_tile_fills_the_multiprocessors() -> None:
    assert tile_for(Form(1024, 768, 768)) in TILES
    small = tile_for(Form(14, 768, 768))
    assert small.rows == 16
    assert isinstance(small, WarpTile)
    assert group_tile_for(Form(1024, 3072, 768, False, True)) == GroupTile(128, 192)
    assert group_tile_for(Form(1024, 768, 3072, False, True)) == GroupTile(64, 96)
