"""The kernel by which compiled code transposes a matrix, alone: so that it can be measured."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import tvm
import tvm_ffi
from tvm import relax

from tvmbridge.core.torch_private import from_dlpack_capsule
from tvmbridge.schedules import cpu_schedule_pass
from tvmbridge.schedules.target import host_target
from tvmbridge.schedules.threads import share_torch_threads


@functools.lru_cache(maxsize=64)
def transposition(rows: int, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of a contiguous float32 matrix (rows, columns): (columns, rows), contiguous."""
    builder = relax.BlockBuilder()
    matrix = relax.Var("matrix", relax.TensorType((rows, columns), "float32"))
    with builder.function("main", [matrix]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.permute_dims(matrix))
        builder.emit_func_output(result)
    target = host_target()
    passes = [relax.transform.LegalizeOps(), cpu_schedule_pass(target)]
    share_torch_threads()
    executable = tvm.compile(tvm.ir.transform.Sequential(passes)(builder.get()), target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    run = machine["main"]
    return lambda tensor: from_dlpack_capsule(run(tvm_ffi.from_dlpack(tensor)).__dlpack__())
