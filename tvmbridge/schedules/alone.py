"""Compile generated kernels on their own, so that they can be measured against a library's."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmbridge.core.torch_private import from_dlpack_capsule
from tvmbridge.kernels.convolution_form import SameConvolution
from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules import convolutions, cpu_schedule_pass
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.products import fits, product
from tvmbridge.schedules.target import host_target
from tvmbridge.schedules.threads import share_torch_threads


def this_machine() -> Machine:
    """Return the description of this machine, on which kernels are measured."""
    return Machine.of(host_target())


@functools.lru_cache(maxsize=64)
def transposition(rows: int, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a compiled function that transposes a contiguous float32 matrix (rows, columns)."""
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


@functools.lru_cache(maxsize=64)
def multiplication(
    form: Form,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """Return a compiled function that multiplies two float32 matrices into its third argument.

    All tensors must be contiguous. None if the generated loops do not support ``form``.
    """
    machine = this_machine()
    if not fits(form, machine):
        return None
    return compiled(product(form, machine))


@functools.lru_cache(maxsize=64)
def convolution(form: SameConvolution) -> Callable[..., None] | None:
    """Return a compiled function that computes a convolution into its last argument.

    All tensors must be float32 and contiguous. None if the generated loops do not support ``form``.
    """
    machine = this_machine()
    if not convolutions.fits(form, machine):
        return None
    return compiled(convolutions.convolution(form, machine))


def compiled(function: tirx.PrimFunc) -> Callable[..., None]:
    """Return a scheduled function, compiled for this machine."""
    share_torch_threads()
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    run: Callable[..., None] = tvm.compile(mod, host_target())["main"]
    return run
