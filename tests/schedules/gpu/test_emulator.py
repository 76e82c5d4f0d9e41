"""The emulator detects faults that would give wrong results on a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.schedules.gpu.emulator import EmulatedFunction, Launch, Lowered, compile_for_host

_HEAD = 'extern "C" __global__ void __launch_bounds__(64) k_kernel(float* __restrict__ x_ptr) {\n'
_SHARED = "__shared__ alignas(64) float s_ptr[64];\n"
BAD = {
    "not all threads of a block": "if (threadIdx.x < 32) { __syncthreads(); }",
    "not all threads of a warp": "if (threadIdx.x < 5) { __shfl_xor_sync(0xffffffffu, 1, 1, 32); }",
    "a write beside an array": "x_ptr[threadIdx.x + 1] = 1.0f;",
    "an access outside of an array, by thread 60 of block 0": "x_ptr[threadIdx.x] = "
    "x_ptr[threadIdx.x > 59 ? threadIdx.x + 4096 : threadIdx.x];",
    "an access outside": "__syncthreads(); x_ptr[threadIdx.x] = "
    "x_ptr[threadIdx.x == 3 ? -4 : (int)threadIdx.x];",
    "threads in another order": "s_ptr[threadIdx.x] = threadIdx.x;"
    "x_ptr[threadIdx.x] = s_ptr[63 - threadIdx.x];",
}


@pytest.mark.parametrize("message", BAD)
def test_mistakes_are_noticed(message: str) -> None:
    library = compile_for_host(f"{_HEAD}{_SHARED}{BAD[message]}\n}}\n")
    lowered = Lowered(1, (), (Launch("k_kernel", (0,), 1, 64),))
    with pytest.raises(AssertionError, match=message):
        EmulatedFunction(library, lowered, 1)(np.zeros(64, np.float32))


def test_a_right_kernel_runs() -> None:
    text = "s_ptr[threadIdx.x] = threadIdx.x; __syncthreads(); "
    text += "x_ptr[threadIdx.x] = s_ptr[63 - threadIdx.x];"
    library = compile_for_host(f"{_HEAD}{_SHARED}{text}\n}}\n")
    assert isinstance(library, ctypes.CDLL)
    x = np.zeros(64, np.float32)
    EmulatedFunction(library, Lowered(1, (), (Launch("k_kernel", (0,), 1, 64),)), 1)(x)
    assert (x == np.arange(64)[::-1]).all()
