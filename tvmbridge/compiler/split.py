"""Split a colored joint function into the two functions ``forward`` and ``backward``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.coloring import Coloring, Recomputation, color, policy_for
from tvmbridge.coloring.operators import operator_name
from tvmbridge.compiler.readers import Readers, readers_of, with_more_copies
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import TensorSpec, ValueDescriptor
from tvmbridge.differentiation.custom_functions import AppliedFunction
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.differentiation.saved import SavedMemory
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, flat_results, shape_of, storage_root
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals


@dataclass(frozen=True)
class SplitModule:
    """The functions ``forward`` and ``backward``, with their calling conventions.

    ``mod`` has ``forward(primals...) -> (outputs..., residuals...)`` and ``backward(reads..., kept
    outputs..., residuals..., cotangents...) -> (gradients...)``. A residual that is also an output
    is not returned twice. Primals and outputs that eager PyTorch does not save are residuals, of
    which ``OwnResiduals`` makes copies.

    - ``primals``: the names of forward's parameters.
    - ``reads``: the names of the primals that backward reads.
    - ``kept_outputs``: the outputs that backward reads: the number, and the shape that it reads.
    - ``residuals``: the values that forward keeps for backward.
    - ``cotangent_of``: for each cotangent, the number of its output.
    - ``wanted``: for each gradient, the name of its primal.
    - ``gradient_reads``: for each gradient, the numbers of the cotangents that it depends on; it is
      None if none of them arrives.
    - ``drawn``: the random draws among the ``reads``.
    - ``functions``: the custom autograd functions, see :class:`JointModule`.
    - ``readers``: which cotangents read the primals and outputs; None: each cotangent reads all.
    - ``recomputation``: the choice of residuals under a memory budget; None without one.
    """

    mod: tvm.IRModule
    primals: tuple[str, ...]
    num_outputs: int
    reads: tuple[str, ...]
    kept_outputs: tuple[tuple[int, tuple[int, ...]], ...]
    residuals: tuple[ValueDescriptor, ...]
    cotangent_of: tuple[int, ...]
    wanted: tuple[str, ...]
    gradient_reads: tuple[frozenset[int], ...]
    drawn: tuple[ValueDescriptor, ...] = ()
    functions: tuple[AppliedFunction, ...] = ()
    readers: Readers | None = None
    recomputation: Recomputation | None = None

    @property
    def residual_bytes(self) -> int:
        """The bytes kept alive only for backward: residuals, and the draws that backward reads."""
        return sum(r.spec.nbytes for r in (*self.residuals, *self.drawn))

    @property
    def bundle(self) -> BundleResiduals:
        """The pass that makes one result, and one parameter, of all residuals."""
        first = len(self.reads) + len(self.kept_outputs)
        return BundleResiduals(self.num_outputs, first, len(self.residuals))


def split(joint: JointModule, coloring: Coloring) -> SplitModule:
    """Build ``{forward, backward}`` from a joint function and its coloring."""
    function = joint.mod["joint"]
    results = flat_results(function)
    primals = function.params[: len(joint.primals)]
    cotangents = function.params[len(joint.primals) :]
    outputs = results[: joint.num_outputs]
    bound = {b.var: b.value for b in coloring.forward}
    saved = joint.saved or SavedMemory.of({}, {})
    copied = [v for v in coloring.reads if v.name in saved.copied_primals]
    reads = [v for v in coloring.reads if v not in copied]
    kept, residuals = _separate_outputs(coloring, outputs, saved.copied_outputs)
    residuals += copied
    forward = build_function("forward", primals, coloring.forward, [*outputs, *residuals])
    readers = None
    if joint.saved is not None and not joint.functions:
        readers = readers_of(coloring, cotangents, reads, kept, joint.saved)
    inputs = [*reads, *kept, *residuals, *cotangents]
    backward = build_function("backward", inputs, coloring.backward, results[joint.num_outputs :])
    return SplitModule(
        mod=tvm.IRModule({"forward": forward, "backward": backward}),
        primals=joint.primals,
        num_outputs=joint.num_outputs,
        reads=tuple(v.name for v in reads),
        kept_outputs=tuple((number, shape_of(v) or ()) for v, number in kept.items()),
        residuals=tuple(_describe(v, bound) for v in residuals),
        cotangent_of=joint.cotangent_of,
        wanted=joint.wanted,
        gradient_reads=joint.gradient_reads
        or _gradient_reads(coloring, cotangents, results[joint.num_outputs :]),
        drawn=tuple(replace(_describe(v, bound), made_by="draw") for v in coloring.drawn),
        functions=joint.functions,
        readers=readers,
        recomputation=coloring.recomputation,
    )


def colored(
    joint: JointModule, options: CompileOptions, device: torch.device
) -> tuple[JointModule, Coloring]:
    """Return the coloring of ``joint`` (see ``color``), and ``joint`` with the copies it needs.

    The policy counts the bytes of a copy. It chooses again whenever its coloring lets a cotangent
    read user memory that the cotangent does not read in eager PyTorch: that memory must be copied.
    """
    policy = policy_for(options.residual_policy, device)
    while True:
        coloring = color(joint, policy, options.recompute, options.memory_budget)
        if joint.saved is None or joint.functions:
            return joint, coloring
        function = joint.mod["joint"]
        cotangents = function.params[len(joint.primals) :]
        outputs = flat_results(function)[: joint.num_outputs]
        kept, _ = _separate_outputs(coloring, outputs, joint.saved.copied_outputs)
        saved = with_more_copies(coloring, cotangents, coloring.reads, kept, joint.saved)
        if saved is None:
            return joint, coloring
        joint = replace(joint, saved=saved)


def _gradient_reads(
    coloring: Coloring, cotangents: Sequence[relax.Var], gradients: Sequence[relax.Expr]
) -> tuple[frozenset[int], ...]:
    """Return, for each gradient, the numbers of the cotangents that it is computed from."""
    none: frozenset[int] = frozenset()
    reads = {v: frozenset([number]) for number, v in enumerate(cotangents)}
    for binding in coloring.backward:
        operands = relax.analysis.free_vars(binding.value)
        reads[binding.var] = none.union(*(reads.get(v, none) for v in operands))
    return tuple(reads.get(g, none) for g in gradients)


def _separate_outputs(
    coloring: Coloring, outputs: Sequence[relax.Expr], unsaved: Collection[int]
) -> tuple[dict[relax.Var, int], list[relax.Var]]:
    """Return the residuals that share memory with an output, with its number, and the others.

    The user may write into an output before backward. Autograd notices that only by the version
    counter of the output itself, so backward must read the output. Outputs in ``unsaved``, which
    eager PyTorch does not save, may be written.
    """
    bound = {b.var: b.value for b in coloring.forward}
    owner: dict[relax.Var, int] = {}
    for number, output in enumerate(outputs):
        root = storage_root(output, bound)
        if root is not None and number not in unsaved:
            owner.setdefault(root, number)
    kept: dict[relax.Var, int] = {}
    others = []
    for residual in coloring.residuals:
        root = storage_root(residual, bound)
        if root in owner:
            kept[residual] = owner[root]
        else:
            others.append(residual)
    return kept, others


def _describe(var: relax.Var, bound: Mapping[relax.Var, relax.Expr]) -> ValueDescriptor:
    made_by: relax.Expr | None = bound.get(var)
    while isinstance(made_by, relax.TupleGetItem | relax.Var):
        source = made_by.tuple_value if isinstance(made_by, relax.TupleGetItem) else made_by
        made_by = bound.get(source)
    return ValueDescriptor(var.name, _spec(var), operator_name(made_by) or "input")


def _spec(var: relax.Var) -> TensorSpec:
    shape = shape_of(var) or ()
    fake = torch.empty(shape, dtype=from_relax_dtype(dtype_of(var)), device="meta")
    return TensorSpec(shape, fake.stride(), fake.dtype, torch.device("cpu"))


def build_function(
    name: str,
    inputs: Sequence[relax.Var],
    bindings: Iterable[relax.Binding],
    results: Sequence[relax.Expr],
) -> relax.Function:
    """Return a function of ``inputs`` that runs ``bindings`` and returns a tuple of ``results``."""
    parameters = [relax.Var(v.name, v.ty) for v in inputs]
    renamed = _Renamer(dict(zip(inputs, parameters, strict=True)))
    builder = relax.BlockBuilder()
    with builder.function(name, parameters):
        with builder.dataflow():
            for binding in bindings:
                renamed.names[binding.var] = builder.emit(
                    renamed.visit_expr(binding.value), binding.var.name
                )
            output = builder.emit_output(relax.Tuple([renamed.visit_expr(r) for r in results]))
        builder.emit_func_output(output)
    return builder.get()[name]


@mutator
class _Renamer(PyExprMutator):
    """Replaces variables by new ones: two functions must not share a variable."""

    def __init__(self, names: Mapping[relax.Var, relax.Var]) -> None:
        super().__init__()
        self.names = dict(names)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.names.get(var, var)

    visit_dataflow_var_ = visit_var_
