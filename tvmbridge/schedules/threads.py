"""Run parallel loops of compiled kernels on PyTorch's own threads.

TVM has its own thread pool, which conflicts with PyTorch's OpenMP pool. Both pools spin while they
wait and take cores from each other. TVM's pool binds the calling thread to a core, and every thread
that calls a kernel (for example autograd's) gets a pool. On x86 it counts half of the processors as
hyperthreads and leaves them idle.

TVM lets a host program supply the function that starts a parallel loop. Here that function is a
small one in LLVM IR, which calls PyTorch's OpenMP runtime. The number of threads is then
``torch.get_num_threads()``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
import tvm_ffi

from tvmbridge.kernels.machine_code import load_functions

logger = logging.getLogger(__name__)

# task(task_id, environment, data) runs its share of a loop; the environment has the task count.
_LAUNCHER = """
define internal void @member(ptr %job) {{
  %task = load ptr, ptr %job
  %data_at = getelementptr i8, ptr %job, i64 8
  %data = load ptr, ptr %data_at
  %environment = alloca [2 x i64], align 8
  %id = call i32 inttoptr (i64 {omp_get_thread_num} to ptr)()
  %count = call i32 inttoptr (i64 {omp_get_num_threads} to ptr)()
  store ptr null, ptr %environment
  %count_at = getelementptr i8, ptr %environment, i64 8
  store i32 %count, ptr %count_at
  %code = call i32 %task(i32 %id, ptr %environment, ptr %data)
  %failed = icmp ne i32 %code, 0
  br i1 %failed, label %note, label %done
note:
  %code_at = getelementptr i8, ptr %job, i64 16
  store atomic i32 %code, ptr %code_at monotonic, align 4
  br label %done
done:
  ret void
}}

define i32 @launch(ptr %task, ptr %data, i32 %count) {{
  %job = alloca [3 x i64], align 8
  store ptr %task, ptr %job
  %data_at = getelementptr i8, ptr %job, i64 8
  store ptr %data, ptr %data_at
  %code_at = getelementptr i8, ptr %job, i64 16
  store i32 0, ptr %code_at
  call void inttoptr (i64 {GOMP_parallel} to ptr)(ptr @member, ptr %job, i32 %count, i32 0)
  %code = load i32, ptr %code_at
  ret i32 %code
}}
"""
_NEEDED = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def share_torch_threads() -> bool:
    """Make modules that are loaded from now on run parallel loops on PyTorch's threads.

    Return False, and leave TVM's own pool in use, if PyTorch was built without GNU's OpenMP
    interface or no temporary file can be written.
    """
    addresses = _openmp_addresses()
    if addresses is None:
        return False
    try:
        (address,) = load_functions(_LAUNCHER.format(**addresses), ("launch",))
    except OSError as error:
        logger.warning("compiled loops run on threads of TVM's own: no temporary file: %s", error)
        return False
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    register = library.TVMFFIEnvModRegisterContextSymbol
    register.argtypes, register.restype = [ctypes.c_char_p, ctypes.c_void_p], ctypes.c_int
    return bool(register(b"__TVMBackendParallelLaunch", address) == 0)


def _openmp_addresses() -> dict[str, int] | None:
    """Return the addresses of functions of PyTorch's OpenMP runtime; None if they are missing."""
    folder = Path(torch.__file__).parent / "lib"
    library = next(iter(sorted(folder.glob("libtorch_cpu.*"))), None)
    if library is None or not torch.backends.openmp.is_available():
        return None
    try:
        handle = ctypes.CDLL(str(library))
        symbols = {name: ctypes.cast(getattr(handle, name), ctypes.c_void_p) for name in _NEEDED}
    except (OSError, AttributeError):
        return None
    return {name: int(symbol.value or 0) for name, symbol in symbols.items()}
