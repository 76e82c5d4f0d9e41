"""Compile small Relax functions with our legalizations and schedules, and call them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import tvm
from tvm import relax

from tests.relax_helpers import build_main
from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.schedules.target import host_target


@functools.cache
def target() -> tvm.target.Target:
    """Return the target of this machine."""
    return host_target()


def build_module(
    graph: Callable[..., relax.Expr], inputs: tuple[torch.Tensor, ...]
) -> tvm.IRModule:
    """Return the Relax module of ``graph`` over variables shaped as ``inputs``."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{i}", relax.TensorType(tuple(t.shape), str(t.dtype).removeprefix("torch.")))
        for i, t in enumerate(inputs)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(graph(*params)))
        builder.emit_func_output(out)
    return builder.get()


def fuse(mod: tvm.IRModule) -> tvm.IRModule:
    """Legalize by our map, and fuse."""
    passes = [
        relax.transform.LegalizeOps(LEGALIZE_MAP),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    return tvm.ir.transform.Sequential(passes)(mod)


def compile_module(mod: tvm.IRModule, *, scheduled: bool = True) -> Callable[..., torch.Tensor]:
    """Fuse, schedule and build a module; return its main function."""
    mod = fuse(mod)
    if scheduled:
        mod = schedule_for_cpu(mod, target())
    return relax.VirtualMachine(tvm.compile(mod, target()), tvm.cpu())["main"]


def run(graph: Callable[..., relax.Expr], *inputs: torch.Tensor) -> torch.Tensor:
    """Compile ``graph`` for the inputs and return its result."""
    return compile_module(build_module(graph, inputs))(*inputs)


def run_all(*calls: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the result of each call, a graph and its inputs; all are compiled as one module."""
    tensors = [tensor for _, *given in calls for tensor in given]

    def together(*variables: relax.Expr) -> list[relax.Expr]:
        rest = iter(variables)
        return [graph(*itertools.islice(rest, len(given))) for graph, *given in calls]

    return list(compile_module(build_main(tensors, together))(*tensors))


def ulps(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the distance of float32 results from float64 ones in units of the last place."""
    size = exact.abs().float()
    step = torch.nextafter(size, torch.tensor(torch.inf)).double() - size.double()
    return (result.double() - exact).abs() / step
