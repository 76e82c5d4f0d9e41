"""Freezing: values that depend only on the module's weights are computed once, not at each call.

Batch norm is folded into the convolution before it, and products with a common operand become one.
All other computations on weights alone move into a separate function, ``transform_params``. Its
results, and packed weights of products, are arguments of ``forward``. Compiled code therefore
contains no values of weights, and the cache can serve it to another process with other weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import tvm
from tvm import relax

from tvmbridge.backends import backend_of
from tvmbridge.compiler.lowering import LoweredModule
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import BuildError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import OutputKind, PassRecord
from tvmbridge.kernels.choice import packing_of
from tvmbridge.kernels.packed import WeightPacking
from tvmbridge.kernels.packed_convolution import PackedForm, faster_packed
from tvmbridge.passes.relax.columns_first import ColumnsFirst
from tvmbridge.passes.relax.combine_parallel_batch_matmul import CombineParallelBatchMatmul
from tvmbridge.passes.relax.fold_batch_norm import FoldBatchNorm
from tvmbridge.passes.relax.lift_frozen import TRANSFORM, LiftFrozen
from tvmbridge.passes.relax.pack_convolutions import (
    PackConvolutions,
    Packings,
    otherwise_laid_out,
    packable_convolutions,
)
from tvmbridge.passes.relax.pack_products import PackProducts, frozen_products
from tvmbridge.passes.relax.parallel_products import ParallelProducts
from tvmbridge.pipeline import AnyPass, run_passes, tidy_passes
from tvmbridge.schedules import alone

_LAYOUTS = {
    "relax.nn.conv2d": ["NHWC", "OIHW"],
    "relax.nn.conv2d_transpose": ["NHWC", "IOHW"],
}


@dataclass(frozen=True)
class FrozenValue:
    """An argument of ``forward`` that is the same at each call: a primal or a computed value.

    - ``primal``: the position of the primal; None for a computed value.
    - ``result``: the number of the result of ``transform_params``; None for a primal.
    - ``packing``: how the value is packed for a library or a kernel; None if it is not packed.
    """

    primal: int | None
    result: int | None
    packing: WeightPacking | PackedForm | None = None


@dataclass(frozen=True)
class Freezing:
    """The arguments that compiled functions take in place of the primals, if weights are frozen.

    ``forward`` takes the primals ``kept``, then ``values``.

    - ``frozen``: the names of the module's tensors whose values must not change.
    - ``kept``: the positions of the primals that ``forward`` takes.
    - ``transformed``: the positions of the primals that ``transform_params`` takes; the function
      exists only if it has results.
    - ``values``: the arguments of ``forward`` that are the same at each call.
    """

    frozen: frozenset[str]
    kept: tuple[int, ...]
    transformed: tuple[int, ...]
    values: tuple[FrozenValue, ...]


def freeze(
    lowered: LoweredModule,
    options: CompileOptions,
    records: list[PassRecord],
    *,
    alone: bool = False,
    live: frozenset[int] = frozenset(),
    for_gpu: bool = False,
) -> tuple[LoweredModule, Freezing]:
    """Freeze the weights of a module that was lowered for inference.

    Args:
        alone: whether the code must run without a library for products. Weights are then not
            packed for a library; weights of products are transposed once.
        live: the places, among the bindings of :func:`folded`, of values that each call computes.
        for_gpu: whether products with a common operand become one product with one bias, and
            weights have the columns of products as their rows.

    Returns:
        The module with frozen weights, and the arguments that its functions take.

    Raises:
        BuildError: a tensor is complex, or not on the CPU.
    """
    captured = lowered.captured
    if not backend_of(captured.device).freezes:
        raise BuildError(f"freeze=True is for modules on the CPU, not on {captured.device}")
    targets = _frozen_targets(captured)
    names = tuple(targets)
    primals = [p.name for p in lowered.mod["forward"].params]
    mod = folded(lowered, options, records, join_biases=for_gpu)
    lift = LiftFrozen(names, transposes=alone and not for_gpu, live=live)
    turned = [ColumnsFirst(names)] if for_gpu else []
    mod = run_passes(mod, [*turned, lift, *tidy_passes()], records)
    lifted = [p.name for p in mod["forward"].params if p.name not in primals]
    packings: tuple[tuple[str, WeightPacking], ...] = ()
    forms: Packings = ()
    if not alone:
        mod, packings = _packed(mod, (*names, *lifted), options, records)
        mod, forms = _channels_last(mod, (*names, *lifted), options, records)
    mod, sources = _without_unread(mod, (*names, *lifted))
    # In the order of forward's parameters. Packed weights are the last of them.
    values = [FrozenValue(None, lifted.index(n)) for n in sources if n in lifted]
    packed: list[tuple[str, WeightPacking | PackedForm]] = [*packings, *forms]
    for name, packing in packed:
        of_result = lifted.index(name) if name in lifted else None
        values.append(
            FrozenValue(None if name in lifted else primals.index(name), of_result, packing)
        )
    transformed = [p.name for p in mod[TRANSFORM].params] if lifted else []
    plan = Freezing(
        frozenset(targets.values()),
        tuple(primals.index(n) for n in sources if n in primals),
        tuple(map(primals.index, transformed)),
        tuple(values),
    )
    return replace(lowered, mod=mod), plan


def folded(
    lowered: LoweredModule,
    options: CompileOptions,
    records: list[PassRecord],
    *,
    join_biases: bool = False,
) -> tvm.IRModule:
    """Return the functions of ``lowered`` with batch norm folded and products combined."""
    names = tuple(_frozen_targets(lowered.captured))
    return run_passes(lowered.mod, _folding_passes(names, options, join_biases), records)


def _frozen_targets(captured: CapturedGraph) -> dict[str, str]:
    """Return the dotted names of the tensors to freeze, none that forward writes."""
    written = {o.target for o in captured.outputs if o.kind is OutputKind.BUFFER_MUTATION}
    found = {}
    for descriptor in captured.inputs:
        if descriptor.kind.is_of_module and descriptor.target not in written:
            if descriptor.spec.dtype.is_complex and not runs_alone():
                raise BuildError(f"freeze=True: {descriptor.target} is complex")
            found[descriptor.name] = descriptor.target or ""
    return found


def _folding_passes(
    names: tuple[str, ...], options: CompileOptions, join_biases: bool
) -> list[AnyPass]:
    passes: list[AnyPass] = [FoldBatchNorm(names)]
    if options.combine_matmuls != "never":

        def weight_refusal(name: str) -> str | None:
            return None if name in names else "its right operand is not frozen"

        def group_refusal(group: ParallelProducts) -> str | None:
            return None if all(group.names) else "parameters and constants are mixed"

        passes.append(
            CombineParallelBatchMatmul(
                weight_refusal=weight_refusal,
                group_refusal=group_refusal,
                join_biases=join_biases,
            )
        )
    return [*passes, *tidy_passes()]


def _packed(
    mod: tvm.IRModule,
    frozen: tuple[str, ...],
    options: CompileOptions,
    records: list[PassRecord],
) -> tuple[tvm.IRModule, tuple[tuple[str, WeightPacking], ...]]:
    """Return ``mod`` with products that read packed weights, and how each weight is packed."""
    packings = []
    for found in frozen_products(mod["forward"], frozen):
        shape = (found.rows, found.depth, found.columns)
        library = packing_of(*shape, found.transposed, options.measure_kernels)
        if library:
            packings.append((found.weight, WeightPacking(library, found.rows, found.transposed)))
    if packings:
        mod = run_passes(mod, [PackProducts(tuple(packings)), *tidy_passes()], records)
    return mod, tuple(packings)


def _channels_last(
    mod: tvm.IRModule,
    frozen: tuple[str, ...],
    options: CompileOptions,
    records: list[PassRecord],
) -> tuple[tvm.IRModule, Packings]:
    """Return ``mod`` with convolutions in channels-last layout, with packed weights, if faster.

    The measured convolutions decide together. Otherwise ``mod`` is returned unchanged.
    """
    found = packable_convolutions(mod["forward"], frozen)
    if isinstance(found, str):
        return mod, ()
    of_weights = [form for _, form in found]
    packed = faster_packed(of_weights, options.measure_kernels, alone.convolution)
    if not packed:
        return mod, ()
    forms = tuple(dict.fromkeys((name, f) for (name, _), f in zip(found, packed, strict=True)))
    # The function transform_params has no convolutions.
    forward = tvm.IRModule({"forward": mod["forward"]})
    convert = relax.transform.ConvertLayout(_LAYOUTS)
    forward = run_passes(forward, [convert, *tidy_passes()], records)
    if otherwise_laid_out(forward["forward"]):
        return mod, ()
    forward = run_passes(forward, [PackConvolutions(forms), *tidy_passes()], records)
    functions = {name.name_hint: f for name, f in mod.functions_items()}
    functions["forward"] = forward["forward"]
    return tvm.IRModule(functions, attrs=mod.attrs), forms


def _without_unread(mod: tvm.IRModule, frozen: Collection[str]) -> tuple[tvm.IRModule, list[str]]:
    """Drop the unread parameters in ``frozen``; return the module and the other names."""
    forward = mod["forward"]
    read = set(relax.analysis.free_vars(forward.body))
    parameters = [p for p in forward.params if p in read or p.name not in frozen]
    functions = {name.name_hint: f for name, f in mod.functions_items()}
    functions["forward"] = relax.Function(
        parameters,
        forward.body,
        forward.ret_ty,
        forward.is_pure,
        forward.attrs,
        forward.span,
    )
    return tvm.IRModule(functions, attrs=mod.attrs), [p.name for p in parameters]
