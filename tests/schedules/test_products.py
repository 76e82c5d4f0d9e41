"""Products in loops: as accurate as PyTorch's, for partial tiles too, without stray writes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import tvm

from tests.thinned import thinned
from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules.alone import multiplication
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.products import product_of_panels

# Rows, columns and depth: full and partial tiles; depths summed in one part and in several; columns
# that are copied, by the last size.
SIZES = [
    (8, 32, 1),
    (9, 33, 7),
    (80, 96, 20),
    (100, 65, 512),
    (31, 257, 600),
    (24, 40, 256),
    (520, 40, 130),
    (130, 65, 1100),
]
TRANSPOSED = [(False, False), (True, False), (False, True)]
GUARD = 1234.5


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize(
    ("size", "transposed"), thinned(itertools.product(SIZES, TRANSPOSED), 2), ids=str
)
def test_equals_the_product_in_float64(
    size: tuple[int, int, int], transposed: tuple[bool, bool], batch: int | None
) -> None:
    form = Form(*size, *transposed, batch)
    if multiplication(form) is None:
        assert form.right_transposed
        assert form.depth < 32 or form.rows > 128
        return
    _check(form)


@pytest.mark.parametrize("transposed", TRANSPOSED, ids=["plain", "left", "right"])
def test_a_left_operand_of_a_whole_batch(transposed: tuple[bool, bool]) -> None:
    _check(Form(41, 70, 300, *transposed, 3, left_shared=True))


def _check(form: Form) -> None:
    """Compare with the product in float64, and see that nothing beside the result is written."""
    multiply = multiplication(form)
    assert multiply is not None
    left, right, out = form.shapes
    a, b = torch.randn(left), torch.randn(right)
    room = torch.full((math.prod(out) + 128,), GUARD)
    result = room[64:-64].view(out)
    multiply(a, b, result)
    exact = a.double().mT if form.left_transposed else a.double()
    exact = exact @ (b.double().mT if form.right_transposed else b.double())
    usual = (exact.abs().max() + form.depth**0.5) * torch.finfo(torch.float32).eps
    assert (result.double() - exact).abs().max() < 8 * usual
    assert (room[:64] == GUARD).all()
    assert (room[-64:] == GUARD).all()


@pytest.mark.parametrize("transposed", TRANSPOSED, ids=["plain", "left", "right"])
def test_numbers_that_are_not_finite(transposed: tuple[bool, bool]) -> None:
    form = Form(40, 64, 300, *transposed)
    multiply = multiplication(form)
    assert multiply is not None
    a, b, result = (torch.randn(shape) for shape in form.shapes)
    a[3, 5], a[7, 7], b[1, 2] = torch.nan, torch.inf, -torch.inf
    multiply(a, b, result)
    left = a.mT if form.left_transposed else a
    expected = left @ (b.mT if form.right_transposed else b)
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=1e-4)


def test_what_is_too_small_or_has_too_many_rows_is_left_to_libraries() -> None:
    forms = [Form(2, 64, 64), Form(64, 8, 64), Form(1000, 64, 64, right_transposed=True)]
    both = Form(64, 64, 64, left_transposed=True, right_transposed=True)
    assert all(multiplication(form) is None for form in [*forms, both])


@pytest.mark.parametrize("depth", [512, 768, 1024])
def test_sums_of_blocks_stay_in_registers(depth: int) -> None:
    """LLVM unrolls a loop over few blocks, and then had more values than registers."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
    product = product_of_panels(Form(128, 768, depth), Machine.of(target))
    mod = tvm.IRModule({"product": product.with_attr("global_symbol", "product")})
    lines = tvm.tirx.build(mod, target).inspect_source("asm").splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith(".L")}
    loops = [
        lines[labels[to] : at]
        for at, line in enumerate(lines)
        if (to := line.split()[-1] if "\tj" in line else "") in labels and labels[to] < at
    ]
    sums = [body for body in loops if sum("vfmadd" in line for line in body) in (12, 24)]
    innermost = [body for body in sums if not any(line.startswith(".L") for line in body[1:])]
    assert innermost
    assert not [line for body in innermost for line in body if "(%rsp)" in line]
