"""The compiled C++ half of products does the same as its Python functions and as PyTorch."""

from __future__ import annotations

import json
import threading

import pytest
import torch
import tvm_ffi

from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.kernels import register_kernels
from tvmbridge.kernels.keys import key_of
from tvmbridge.kernels.matmul import (
    MATMUL,
    ONEDNN_MATMUL,
    View,
    matmul_spec,
    run_matmul,
    run_onednn_matmul,
)

pytestmark = pytest.mark.skipif(
    compiled_half("tvmbridge.kernels._products") is None, reason="the compiled half is missing"
)

Case = tuple[tuple[int, ...], View, tuple[int, ...], View, tuple[int, ...]]
# For both operands a shape and a view, given as (shape, strides) or None; the result's shape.
CASES: list[Case] = [
    ((3, 4), None, (4, 5), None, (3, 5)),
    ((3, 4), None, (5, 4), ((4, 5), (1, 4)), (3, 5)),
    ((2, 3, 4), ((4, 6), (1, 4)), (6, 5), None, (4, 5)),
    ((2, 3, 4), None, (2, 5, 4), ((2, 4, 5), (20, 1, 4)), (2, 3, 5)),
    ((3, 0), None, (0, 5), None, (3, 5)),
]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_kernels()


def _viewed(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return tensor if view is None else tensor.as_strided(*view)


def _tensors(case: Case, dtype: torch.dtype, biased: bool) -> tuple[str, list[torch.Tensor]]:
    torch.manual_seed(3)
    left, left_view, right, right_view, shape = case
    tensors = [torch.randn(left).to(dtype), torch.randn(right).to(dtype)]
    if biased:
        tensors.append(torch.randn(shape[1]).to(dtype))
    return matmul_spec((left_view, right_view), shape), tensors


def _expected(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    a, b = (_viewed(t, v) for t, v in zip(tensors, (case[1], case[3]), strict=False))
    product = a.double() @ b.double()
    return product + tensors[2].double() if len(tensors) > 2 else product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_usual_kernel(case: Case, dtype: torch.dtype, biased: bool) -> None:
    if biased and len(case[4]) == 3:
        pytest.skip("batches have no bias")
    spec, tensors = _tensors(case, dtype, biased)
    found, other = (torch.full(case[4], float("nan"), dtype=dtype) for _ in range(2))
    arguments = [tvm_ffi.from_dlpack(t) for t in tensors]
    tvm_ffi.get_global_func(MATMUL)(key_of(spec), *arguments, tvm_ffi.from_dlpack(found))
    run_matmul(key_of(spec), *arguments, tvm_ffi.from_dlpack(other))
    assert torch.equal(found, other)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.double(), _expected(case, tensors), rtol=tolerance, atol=4 * tolerance
    )


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_that_of_onednn(case: Case, biased: bool) -> None:
    spec, tensors = _tensors(case, torch.float32, biased)
    arguments = [tvm_ffi.from_dlpack(t) for t in tensors]
    found = torch.from_dlpack(tvm_ffi.get_global_func(ONEDNN_MATMUL)(key_of(spec), *arguments))
    assert torch.equal(found, run_onednn_matmul(key_of(spec), *arguments))
    torch.testing.assert_close(found.double(), _expected(case, tensors), rtol=1e-6, atol=1e-5)
    assert not found.requires_grad


def test_a_result_outlives_its_operands() -> None:
    spec, tensors = _tensors(CASES[1], torch.float32, biased=False)
    expected = _expected(CASES[1], tensors)
    arguments = [tvm_ffi.from_dlpack(t) for t in tensors]
    found = tvm_ffi.get_global_func(ONEDNN_MATMUL)(key_of(spec), *arguments)
    del arguments, tensors
    torch.testing.assert_close(torch.from_dlpack(found).double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("no spec", json.JSONDecodeError, "Expecting value"),
        (
            matmul_spec((None, None), (2, 5)),
            RuntimeError,
            "mat1 and mat2|invalid for input|must match",
        ),
    ],
)
def test_errors_are_told(spec: str, error: type[Exception], message: str) -> None:
    a, b, out = torch.randn(3, 4), torch.randn(5, 6), torch.empty(2, 5)
    with pytest.raises(error, match=message):
        tvm_ffi.get_global_func(MATMUL)(spec, *(tvm_ffi.from_dlpack(t) for t in (a, b, out)))


def test_an_error_keeps_its_class() -> None:
    # PyTorch has no matrix product of booleans.
    tensors = [torch.ones(3, 4, dtype=torch.bool), torch.ones(4, 5, dtype=torch.bool)]
    out = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(RuntimeError) as expected:
        torch.mm(*tensors, out=out)
    spec = key_of(matmul_spec((None, None), (3, 5)))
    with pytest.raises(RuntimeError) as found:
        tvm_ffi.get_global_func(MATMUL)(spec, *(tvm_ffi.from_dlpack(t) for t in (*tensors, out)))
    assert type(found.value) is type(expected.value)


def test_threads_may_meet_a_spec_at_the_same_time() -> None:
    kernel = tvm_ffi.get_global_func(MATMUL)
    wrong: list[int] = []
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        for size in range(2, 60):
            a, b, out = torch.randn(size, 3), torch.randn(3, 7), torch.empty(size, 7)
            spec = key_of(matmul_spec((None, None), (size, 7)))
            kernel(spec, *(tvm_ffi.from_dlpack(t) for t in (a, b, out)))
            if not torch.allclose(out, a @ b):
                wrong.append(size)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
