"""Build a module of pure Relax functions into an executable for a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import tvm
from tvm import relax, te

from tvmbridge.backends import Backend, backend_for
from tvmbridge.compiler.argument_checks import UNCHECKED
from tvmbridge.compiler.buffers import BufferPlan, NotePlans, Reuse
from tvmbridge.compiler.split import build_function
from tvmbridge.core.errors import BuildError
from tvmbridge.core.types import PassRecord
from tvmbridge.kernels import register_kernels
from tvmbridge.passes.base import bindings_of, shared_results
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals
from tvmbridge.passes.relax.dead_code_elimination import DropUnreadTuples
from tvmbridge.passes.relax.declare_results import DeclareResults
from tvmbridge.passes.relax.launch_as_graph import LaunchAsGraph
from tvmbridge.passes.relax.name_specs import NameSpecs, specs_by_key
from tvmbridge.passes.relax.own_residuals import OwnResiduals
from tvmbridge.pipeline import AnyPass, pass_name, run_passes
from tvmbridge.records import Coverage, Library, Task, apply_records, coverage_of
from tvmbridge.records.library import EMPTY as NO_RECORDS
from tvmbridge.schedules.exact_indices import with_exact_indices

# LLVM finds common subexpressions itself. TVM's pass moves some before the values they are made of.
COMPILER_CONFIG = {"tirx.disable_cse_tir": True}
_CPU = torch.device("cpu")
# The function of a module that returns nothing.
RELEASE = "release"


def _as_tvm_pass(pass_: AnyPass) -> tvm.transform.Pass:
    if isinstance(pass_, tvm.transform.Pass):
        return pass_

    @tvm.transform.module_pass(opt_level=0, name=pass_name(pass_))
    def run(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return pass_(mod)

    return run


def _planning_passes(backend: Backend, noting: NotePlans) -> list[tvm.transform.Pass]:
    return [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        *[_as_tvm_pass(p) for p in backend.allocation_passes()],
        _as_tvm_pass(noting),
    ]


def planned(mod: tvm.IRModule, target: tvm.target.Target) -> dict[str, BufferPlan]:
    """Return the buffer plan of each function of ``mod``, without compiling it for ``target``."""
    noting = NotePlans()
    with target:
        fused = fuse(mod, target, [])
        tvm.transform.Sequential(_planning_passes(backend_for(target), noting))(fused)
    return noting.plans


def _virtual_machine_passes(
    backend: Backend, noting: NotePlans, as_graph: bool
) -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            *_planning_passes(backend, noting),
            *([_as_tvm_pass(LaunchAsGraph())] if as_graph else []),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            _as_tvm_pass(DropUnreadTuples()),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )


@dataclass(frozen=True)
class Code:
    """A compiled module before it is loaded; mappings are by the name of a function.

    - ``executable``: TVM's executable.
    - ``unaligned``: for each argument, whether it may have any address.
    - ``shared``: the numbers of results that are constants, views, or equal to another result.
      Constant folding and merging add some to those of the source.
    - ``coverage``: the number of kernel calls, by the origin of the kernel.
    - ``missing``: the kernels that nobody has tuned, with the number of calls of each.
    - ``keys``: the specs of kernels by the short keys that replace them in the code.
    - ``reuse``: how much memory the buffers share.
    - ``least``: the least value of each symbol that loops of symbolic code are right for.
    - ``most``: the largest value of each symbol that symbolic code serves.
    """

    executable: Any
    unaligned: Mapping[str, tuple[bool, ...]]
    shared: Mapping[str, frozenset[int]]
    coverage: Coverage
    missing: Mapping[Task, int]
    keys: Mapping[str, str]
    reuse: Mapping[str, Reuse]
    least: tuple[int, ...] = ()
    most: tuple[int, ...] = ()


@dataclass(frozen=True)
class Built:
    """A loaded executable; other fields as in :class:`Code`.

    - ``machine``: TVM's virtual machine with the loaded code.
    - ``cache``: ``hit`` if the code came from the cache; otherwise why it was compiled.
    - ``key``: the name of the code in the cache; empty if it is not there.
    - ``source``: the entries of that key that identify the graphs.
    """

    machine: relax.VirtualMachine
    unaligned: Mapping[str, tuple[bool, ...]]
    shared: Mapping[str, frozenset[int]]
    coverage: Coverage
    missing: Mapping[Task, int]
    cache: str = ""
    reuse: Mapping[str, Reuse] = field(default_factory=dict)
    key: str = ""
    source: Mapping[str, str] = field(default_factory=dict)
    least: tuple[int, ...] = ()
    most: tuple[int, ...] = ()


def _may_be_unaligned(function: relax.Function) -> tuple[bool, ...]:
    """Return, for each parameter, whether only PyTorch's kernels read it.

    PyTorch's kernels take unaligned addresses; compiled loops do not. Weights loaded from a file
    are often unaligned, and copying them at each call would cost more than the call.
    """
    bound = bindings_of(function)
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


def with_some_loops(mod: tvm.IRModule) -> tvm.IRModule:
    """Return ``mod`` with at least one function of loops: without any, TVM needs a C compiler."""
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
    """Return ``mod`` as calls of kernels and of fused functions, whose loops are not scheduled."""
    register_kernels()
    with target:
        return run_passes(mod, backend_for(target).kernel_passes(measure), records)


@dataclass(frozen=True)
class Fused:
    """A module of fused functions that are not scheduled yet; other fields as in :class:`Code`."""

    mod: tvm.IRModule
    target: tvm.target.Target
    unaligned: Mapping[str, tuple[bool, ...]]
    shared: Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class Scheduled(Fused):
    """A module of scheduled functions, which are not compiled yet; fields as in :class:`Code`."""

    coverage: Coverage
    missing: Mapping[Task, int]


def build(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    records: list[PassRecord],
    bundle: BundleResiduals | None = None,
) -> Built:
    """Compile ``mod`` without measurements or tuning records, and load it on the CPU.

    Args:
        bundle: the pass that makes one result, and one argument, of all residuals; None: no
            residuals.

    Raises:
        BuildError: TVM cannot compile the module for ``target``.
    """
    return load(schedule(prepare(mod, target, records), records, bundle=bundle), records)


def prepare(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    records: list[PassRecord],
    *,
    measure: bool = False,
) -> Fused:
    """Fuse ``mod`` (see :func:`fuse`); find unaligned arguments and results that share memory."""
    backend_for(target).prepare()
    names = [n.name_hint for n, f in mod.functions_items() if isinstance(f, relax.Function)]
    given = {name: shared_results(mod, name) for name in names}
    mod = fuse(mod, target, records, measure=measure)
    shared = {name: given[name] | shared_results(mod, name) for name in names}
    with target:
        unaligned = {
            name.name_hint: _may_be_unaligned(function)
            for name, function in mod.functions_items()
            if isinstance(function, relax.Function)
        }
    return Fused(mod, target, unaligned, shared)


def schedule(
    fused: Fused,
    records: list[PassRecord],
    *,
    library: Library = NO_RECORDS,
    bundle: BundleResiduals | None = None,
) -> Scheduled:
    """Schedule the loops of every function; arguments as for :func:`build`."""
    target, backend = fused.target, backend_for(fused.target)
    with target:
        applied = apply_records(fused.mod, library if backend.tuned else NO_RECORDS)
        mod = backend.schedule(applied.mod, target)
        coverage = coverage_of(mod, applied.tuned)
        passes: list[AnyPass] = [DeclareResults()]
        if bundle is not None:
            passes = [OwnResiduals(bundle.num_outputs), *passes, bundle]
        mod = run_passes(mod, passes, records)
    unaligned = dict(fused.unaligned)
    if bundle is not None and "backward" in unaligned:
        first, count = bundle.first, bundle.count
        flags = unaligned["backward"]
        unaligned["backward"] = (*flags[:first], False, *flags[first + count :])
    missing = applied.missing if backend.tuned else {}
    return Scheduled(mod, target, unaligned, fused.shared, coverage, missing)


def load(scheduled: Scheduled, records: list[PassRecord], device: torch.device = _CPU) -> Built:
    """Compile the result of :func:`schedule`, and load it on ``device``."""
    code = compile_code(scheduled, records)
    return load_code(code, code.executable, scheduled.target, device)


def compile_code(
    scheduled: Scheduled, records: list[PassRecord], *, as_graph: bool = False
) -> Code:
    """Compile the result of :func:`schedule`; ``as_graph``: see :class:`LaunchAsGraph`."""
    target, noting = scheduled.target, NotePlans()
    with target:
        # The time of a check of types grows with the square of the number of residuals.
        mod = run_passes(scheduled.mod, [NameSpecs()], records, check_types=False)
        keys = specs_by_key(mod)
        try:
            mod = _releasing(with_exact_indices(with_some_loops(mod)))
            left_out = backend_for(target).left_out
            with tvm.transform.PassContext(config=COMPILER_CONFIG, disabled_pass=left_out):
                executable = relax.build(
                    mod,
                    target,
                    relax_pipeline=_virtual_machine_passes(backend_for(target), noting, as_graph),
                    tir_pipeline=UNCHECKED,
                )
        except Exception as error:
            raise BuildError(f"TVM cannot compile for {target}: {error}") from error
    unaligned, shared = scheduled.unaligned, scheduled.shared
    reuse = {n: p.reuse for n, p in noting.plans.items() if p.storages}
    coverage, missing = scheduled.coverage, scheduled.missing
    return Code(executable, unaligned, shared, coverage, missing, keys, reuse)


def _releasing(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with a function that returns nothing.

    A virtual machine keeps the results of its last call, which may be residuals, gradients that the
    caller has dropped, or tensors in the memory of a CUDA graph.
    """
    nothing = build_function(RELEASE, (), (), ())
    return tvm.IRModule({**dict(mod.functions_items()), RELEASE: nothing}, attrs=mod.attrs)


def make_ready(target: tvm.target.Target) -> None:
    """Register the functions that code for ``target`` needs, before it is compiled or loaded."""
    backend_for(target).prepare()
    register_kernels()


def load_code(
    code: Code, module: Any, target: tvm.target.Target, device: torch.device, cache: str = ""
) -> Built:
    """Start a virtual machine for compiled code.

    Args:
        module: the executable of ``code``, or the module that was loaded from its exported form.
    """
    machine = relax.VirtualMachine(module, backend_for(target).device(device))
    unaligned, shared, least, most = code.unaligned, code.shared, code.least, code.most
    coverage, missing, reuse = code.coverage, code.missing, code.reuse
    return Built(
        machine, unaligned, shared, coverage, missing, cache, reuse, least=least, most=most
    )
