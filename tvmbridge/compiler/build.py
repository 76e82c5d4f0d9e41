"""Build: a module of pure functions becomes an executable for a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te

from tvmbridge.core.errors import BuildError, first_line
from tvmbridge.core.types import PassRecord
from tvmbridge.kernels import register_kernels
from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.legalize.fences import fence_arithmetic
from tvmbridge.passes.base import shared_results
from tvmbridge.passes.relax.compile_aten_calls import CompileAtenCalls
from tvmbridge.passes.relax.declare_results import DeclareResults
from tvmbridge.passes.relax.dispatch_convolutions import DispatchConvolutions
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels
from tvmbridge.passes.relax.fuse_ops import FuseOps
from tvmbridge.passes.relax.name_specs import NameSpecs
from tvmbridge.pipeline import AnyPass, run_passes, tidy_passes
from tvmbridge.records import Coverage, Library, Task, apply_records, coverage_of
from tvmbridge.records.library import EMPTY as NO_RECORDS
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.schedules.exact_indices import with_exact_indices
from tvmbridge.schedules.target import host_target
from tvmbridge.schedules.threads import share_torch_threads

# LLVM finds common expressions itself; TVM's search moves some in front of what they are made of.
COMPILER_CONFIG = {"tirx.disable_cse_tir": True}


def resolve_target(target: Any, device_type: str = "cpu") -> tvm.target.Target:
    """The target to compile for: what the user named, or the machine's own.

    Raises:
        BuildError: TVM does not know the target, or it does not fit the tensors' device.
    """
    if target is None:
        if device_type != "cpu":
            raise BuildError(
                f"tensors on {device_type!r} are not supported; move the module to the CPU"
            )
        return host_target()
    try:
        resolved = tvm.target.Target(target)
    except Exception as error:
        raise BuildError(
            f"TVM does not know the target {target!r}: {first_line(error)}; "
            'use "llvm" or None for this machine\'s CPU'
        ) from error
    if resolved.kind.name != "llvm":
        raise BuildError(
            f"target {resolved.kind.name!r} is not supported; use 'llvm' or None for this "
            "machine's CPU"
        )
    if device_type != "cpu":
        raise BuildError(f"target {resolved} does not fit tensors on {device_type!r}")
    return host_target() if not resolved.attrs.get("mcpu") else resolved


def kernel_passes(measure: bool) -> list[AnyPass]:
    """From Relax operators to loops and calls of kernels, measured or not (DispatchKernels)."""
    return [
        # A bias costs nothing in the kernel that TVM fuses behind the product, and a pass over the
        # result inside it.
        DispatchKernels(fuse_bias=False, measure=measure),
        DispatchConvolutions(),
        *tidy_passes(),
        CompileAtenCalls(),
        relax.transform.LegalizeOps(LEGALIZE_MAP),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(),
        FuseOps(),
        relax.transform.FuseTIR(),
        # Recognises reshapes by their loops, so it must see them before they are scheduled.
        relax.transform.RewriteDataflowReshape(),
        relax.transform.DeadCodeElimination(),
    ]


def _virtual_machine_passes() -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )


@dataclass(frozen=True)
class Built:
    """A loaded executable, and which arguments of each function may lie at any address.

    ``shared`` are the results of each function that are constants, views, or one with another:
    folding and merging make more of them than the function had. ``coverage`` counts where the
    kernels come from, ``missing`` are tasks that nobody has tuned, with the number of calls.
    """

    machine: relax.VirtualMachine
    unaligned: Mapping[str, tuple[bool, ...]]
    shared: Mapping[str, frozenset[int]]
    coverage: Coverage
    missing: Mapping[Task, int]


def _may_be_unaligned(function: relax.Function) -> tuple[bool, ...]:
    """Parameters that only PyTorch's kernels read: they take any address, our loops do not.

    Weights that were loaded from a file often start anywhere, and copying them at each call would
    cost more than the call.
    """
    bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    strict = set(relax.analysis.free_vars(function.body.body))
    for var, value in reversed(bound.items()):
        if _is_packed_call(value) or (_is_view(value) and var not in strict):
            continue
        strict |= set(relax.analysis.free_vars(value))
    return tuple(p not in strict for p in function.params)


def _is_packed_call(value: relax.Expr) -> bool:
    packed = ("relax.call_pure_packed", "relax.call_dps_packed")
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") in packed


def _is_view(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.reshape"


def _with_some_loops(mod: tvm.IRModule) -> tvm.IRModule:
    """``mod`` with a function of loops if it has none: TVM would ask for a C compiler otherwise."""
    if any(isinstance(f, tvm.tirx.PrimFunc) for _, f in mod.functions_items()):
        return mod
    source = te.placeholder((1,), "int32")
    copied = te.compute((1,), lambda i: source[i])
    unused = te.create_prim_func([source, copied]).with_attr("global_symbol", "unused")
    functions = dict(mod.functions_items())
    return tvm.IRModule({**functions, tvm.ir.GlobalVar("unused"): unused}, attrs=mod.attrs)


def fuse(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    records: list[PassRecord],
    *,
    measure: bool = False,
) -> tvm.IRModule:
    """``mod`` with calls of kernels and of fused functions, whose loops are not scheduled yet."""
    register_kernels()
    with target:
        return run_passes(mod, kernel_passes(measure), records)


def build(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    records: list[PassRecord],
    *,
    measure: bool = False,
    library: Library = NO_RECORDS,
) -> Built:
    """Compile ``mod`` and load it; ``measure`` lets kernels be chosen by measurement.

    Functions for which ``library`` has a tuning record get its schedule, the others that of a rule.

    Raises:
        BuildError: TVM cannot compile it for ``target``.
    """
    share_torch_threads()
    fence_arithmetic()
    names = [name.name_hint for name, _ in mod.functions_items()]
    given = {name: shared_results(mod, name) for name in names}
    mod = fuse(mod, target, records, measure=measure)
    shared = {name: given[name] | shared_results(mod, name) for name in names}
    with target:
        unaligned = {
            name.name_hint: _may_be_unaligned(function)
            for name, function in mod.functions_items()
            if isinstance(function, relax.Function)
        }
        applied = apply_records(mod, library)
        mod = schedule_for_cpu(applied.mod, target)
        coverage = coverage_of(mod, applied.tuned)
        mod = run_passes(mod, [DeclareResults(), NameSpecs()], records)
        try:
            mod = with_exact_indices(_with_some_loops(mod))
            with tvm.transform.PassContext(config=COMPILER_CONFIG):
                executable = relax.build(mod, target, relax_pipeline=_virtual_machine_passes())
        except Exception as error:
            raise BuildError(f"TVM cannot compile for {target}: {error}") from error
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return Built(machine, unaligned, shared, coverage, applied.missing)
