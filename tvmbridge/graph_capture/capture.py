"""Capture a module: run torch.export and describe its program as a CapturedGraph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tvmbridge.backends import is_on_host
from tvmbridge.calls.standins import (
    attributes_put_back,
    without_hooks,
    without_repetitions,
)
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.autocast import autocast_now, without_autocast
from tvmbridge.core.captured_graph import Assumptions, CallingConvention, CapturedGraph
from tvmbridge.core.errors import (
    CaptureError,
    DataDependentError,
    NotApartError,
    PassError,
    StateWrittenError,
    UnsupportedOperatorError,
)
from tvmbridge.core.generated import plain_text
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.number_inputs import number_inputs, with_tensors
from tvmbridge.core.structure import children
from tvmbridge.core.torch_private import dynamo_config, inductor_config, pytree
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import IntermediateBase, OutputDescriptor, OutputKind, PassRecord
from tvmbridge.graph_capture.dependence import depends_on_values
from tvmbridge.graph_capture.host_constants import device_of, move_in_program
from tvmbridge.graph_capture.noise import find_noise, tidy_draws
from tvmbridge.graph_capture.observe.descriptors import (
    OWN_GENERATOR,
    describe_inputs,
    describe_outputs,
    find_aliases,
    with_aliases,
)
from tvmbridge.graph_capture.observe.refusal import (
    first_paragraph,
    raise_if_forward_refuses,
    user_line,
)
from tvmbridge.graph_capture.observe.staging import StagedModule, staged
from tvmbridge.graph_capture.observe.undo import current_undo
from tvmbridge.graph_capture.open_masks import OpenMask, drop_open_masks
from tvmbridge.graph_capture.prologue import cut_prologue
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.graph_capture.symbols import (
    dynamic_shapes,
    has_odd_names,
    size_marks_put_away,
    spelled_out,
)
from tvmbridge.graph_capture.trace.alone_parts import alone_decompositions
from tvmbridge.graph_capture.trace.answers import known_values
from tvmbridge.graph_capture.trace.autocast import casts_recorded
from tvmbridge.graph_capture.trace.backends import only_switched_off
from tvmbridge.graph_capture.trace.by_operator import decomposed
from tvmbridge.graph_capture.trace.complex_parts import complex_decompositions
from tvmbridge.graph_capture.trace.composites import composites_prepared_for
from tvmbridge.graph_capture.trace.decompositions import (
    decomposition_table,
    kept_whole_under_autograd,
)
from tvmbridge.graph_capture.trace.empties import drop_empty_operands
from tvmbridge.graph_capture.trace.exchanges import exchanges_left_alone
from tvmbridge.graph_capture.trace.functions import functions_replaced
from tvmbridge.graph_capture.trace.held_numbers import held_by
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels
from tvmbridge.graph_capture.trace.linear_export import export_in_linear_time
from tvmbridge.graph_capture.trace.reshapes import reshape_instead_of_view
from tvmbridge.graph_capture.traced_forward import TracedForward
from tvmbridge.passes.fx.run import rewrite_program


def normalize_sample(
    sample_input: Any, sample_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample as ``(args, kwargs)``.

    A tuple holds the positional arguments; any other ``sample_input`` is one argument.

    Raises:
        TypeError: ``sample_kwargs`` is no mapping.
    """
    args = sample_input if type(sample_input) is tuple else (sample_input,)
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise TypeError(
            f"sample_kwargs must be a dict of keyword arguments, not {type(sample_kwargs).__name__}"
        )
    return args, {
        plain_text(name) if isinstance(name, str) else name: value
        for name, value in (sample_kwargs or {}).items()
    }


def capture(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    needs_grad: bool | None = None,
) -> CapturedGraph:
    """Export ``module`` with torch.export, in its current mode and under the current autocast.

    Args:
        module: any traceable module, in train or eval mode; it is not changed.
        sample_input: a tensor, or a tuple of positional arguments (nested structures allowed).
        sample_kwargs: keyword arguments of forward.
        needs_grad: whether the graph will be differentiated, which decides which operators are
            decomposed; by default ``module.training``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
        CaptureError: forward itself raises for the sample, or torch.export cannot capture it; the
            message names the line.
        UnsupportedOperatorError: the graph draws random numbers in a way that cannot be hoisted.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    needs_grad = module.training if needs_grad is None else needs_grad
    register_containers(module)
    stage_of = partial(staged, module, args, kwargs, needs_grad, autocast=autocast_now())
    with compiling(), tracing_here(), without_autocast():
        try:
            return capture_staged(stage_of(), args, kwargs, needs_grad)
        except NotApartError:
            return capture_staged(stage_of(apart=False), args, kwargs, needs_grad)


def capture_staged(
    stage: StagedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    records: list[PassRecord] | None = None,
) -> CapturedGraph:
    """Export the module of ``stage``, as :func:`capture` does for a user's module.

    Raises:
        CaptureError: forward raises for the sample or cannot be observed, or torch.export cannot
            capture it.
    """
    module, seen = stage.module, stage.observation
    bases = () if seen is None else seen.sharing.bases
    program, forward = _export(stage, args, kwargs, needs_grad, bases, records)
    if seen is None:
        raise CaptureError(
            f"forward of {type(module).__name__} cannot be watched: "
            f"{first_paragraph(stage.failure)}"
        ) from stage.failure
    leaves, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    numbers, ranges = forward.numbers, forward.held.ranges if forward.held else {}
    inputs, constant_tensors = describe_inputs(module, program, leaves, needs_grad)
    device = inputs[0].spec.device if inputs else None
    outputs = with_aliases(describe_outputs(program, device), seen)
    _refuse_writes_into_carried(stage, outputs)
    noise = find_noise(program.graph)
    convention = CallingConvention(
        in_spec=in_spec,
        out_spec=seen.structure if forward.epilogue is None else children(seen.structure)[0],
        changed_arguments=forward.changed_arguments,
        assigned=seen.assigned,
        left=forward.ways,
        bases=bases,
        checks=forward.checks,
        numbers=numbers,
        held={name: (held_by(module)[name], known) for name, known in ranges.items()},
    )
    assumptions = Assumptions(
        training=module.training,
        constants={
            i: leaf
            for i, leaf in enumerate(leaves)
            if not (isinstance(leaf, torch.Tensor) or i in numbers)
        },
        aliases=find_aliases(module),
        values=seen.values,
        outside=seen.outside,
        foreign=seen.foreign,
        asks=seen.asks,
        normed=seen.normed,
        answers=forward.answers,
        is_compiling=stage.is_compiling,
        autocast=stage.autocast,
        executed=seen.executed,
    )
    return CapturedGraph(
        program=program,
        inputs=inputs,
        outputs=outputs,
        noise=noise,
        constant_tensors=constant_tensors,
        convention=convention,
        assumptions=assumptions,
        outside=stage.outside,
        carried=stage.carried,
        prologue=cut_prologue(program.graph, noise, constant_tensors),
        epilogue=forward.epilogue,
    )


def _refuse_writes_into_carried(stage: StagedModule, outputs: Sequence[OutputDescriptor]) -> None:
    """Refuse writes into tensors of a container, because two of its tensors may share memory."""
    for output in outputs:
        place = stage.carried.get(output.target or "")
        if place is not None and output.kind is not OutputKind.USER:
            raise StateWrittenError(
                f"forward of {type(stage.module).__name__} writes into {place.label} and sets "
                "the attribute to another value"
            )


def _export(
    stage: StagedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    bases: Sequence[IntermediateBase],
    records: list[PassRecord] | None,
) -> tuple[ExportedProgram, TracedForward]:
    try:
        return _exported(stage, args, kwargs, needs_grad, bases, None, records)[:2]
    except (CaptureError, PassError):
        raise
    except Exception as error:
        module = stage.module
        raise_if_forward_refuses(module, args, kwargs, stage.autocast)
        if "torch._C.Generator" in str(error):  # PyTorch 2.11 cannot trace an operator given one
            raise UnsupportedOperatorError(OWN_GENERATOR) from error
        line = user_line(error) or "an unknown line"
        kind = DataDependentError if depends_on_values(error) else CaptureError
        raise kind(
            f"torch.export cannot capture {type(module).__name__}; it stopped at {line}: "
            f"{first_paragraph(error)}"
        ) from error


def export_with_symbols(
    stage: StagedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    symbolic: Mapping[int, Mapping[int, Any]],
) -> tuple[ExportedProgram, tuple[OpenMask, ...]]:
    """Export the module of ``stage`` with symbols in place of some sizes.

    ``symbolic`` maps the number of an argument's leaf to its symbolic dimensions. Errors of
    torch.export are not wrapped. Also return the masks that were removed, because they mask
    nothing or are causal at the sizes of the sample.
    """
    bases = () if stage.observation is None else stage.observation.sharing.bases
    # PyTorch takes longer to find a result with symbols in its cache than to compute it.
    with dynamo_config().patch(fake_tensor_cache_enabled=False):
        program, _, masks = _exported(stage, args, kwargs, needs_grad, bases, symbolic)
    return program, masks


def _exported(
    stage: StagedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    bases: Sequence[IntermediateBase],
    symbolic: Mapping[int, Mapping[int, Any]] | None = None,
    records: list[PassRecord] | None = None,
) -> tuple[ExportedProgram, TracedForward, tuple[OpenMask, ...]]:
    """Return the decomposed program, the forward that was traced, and the masks it has no more.

    Errors of torch.export are not wrapped.
    """
    module = stage.module
    table = decomposition_table(differentiated=needs_grad or module.training)
    if runs_alone():
        table |= alone_decompositions(table)
        table |= complex_decompositions(table)
    with (
        # torch.export restores copies of containers, a separate one for each sharing module.
        attributes_put_back(module),
        torch.set_grad_enabled(needs_grad),
        without_autocast(),
        without_hooks(module),
        kept_whole_under_autograd(),
        export_in_linear_time(),
        only_switched_off(),
        size_marks_put_away((args, kwargs)),
        warnings.catch_warnings(),
    ):
        # torch.export copies its own tree specs in a way that torch deprecates.
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)
        # It becomes an input, whose gradient is computed.
        warnings.filterwarnings("ignore", "A model attribute .* requires gradient", UserWarning)
        # Sizes of masks of nn.MultiheadAttention are arguments, and no nodes.
        warnings.filterwarnings("ignore", "Raw SymInt value", UserWarning)
        with exchanges_left_alone(), functions_replaced(module, on_fakes=False), casts_recorded():
            forward = TracedForward(
                module=module,
                is_compiling=stage.is_compiling,
                differentiated=needs_grad,
                values=known_values(module, args, kwargs),
                bases=bases,
                exported=True,
                autocast=stage.autocast,
                left=() if stage.observation is None else tuple(stage.observation.left),
            )
            given, named = without_repetitions((args, dict(kwargs)))
            leaves, form = pytree.tree_flatten((given, named))
            forward.numbers = number_inputs(leaves)
            if forward.numbers:
                given, named = pytree.tree_unflatten(with_tensors(leaves), form)
            structure = None
            if has_odd_names((given, named)):
                leaves, structure = pytree.tree_flatten((given, named))
                given, named = tuple(leaves), {}
            with forward.in_place(structure), current_undo().run():
                dynamic = None
                if symbolic is not None or structure is not None:
                    module.forward.__dict__["__signature__"] = spelled_out(given, named)
                if symbolic is not None:
                    dynamic = dynamic_shapes(module, given, named, symbolic)
                program = torch.export.export(
                    module, given, named, dynamic_shapes=dynamic, strict=False
                )
        if stage.fx_passes:
            done = rewrite_program(program, stage.fx_passes)
            if records is not None:
                records.extend(done)
        masks = drop_open_masks(program.graph)
        return _taken_apart(program, table), forward, masks


def _taken_apart(program: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """Return ``program`` in functional ATen, decomposed by ``table``."""
    _name_buffers_once(program)
    reshape_instead_of_view(program)
    modules = any(isinstance(x, nn.Module) for x in pytree.tree_leaves(program.example_inputs))
    if not program.range_constraints and not modules:
        # With them, PyTorch writes checks of arguments as source, where PyTorch 2.11 has no nan. If
        # sizes are symbols, these checks hold what forward demands of them.
        program.example_inputs = None
    # Without fallback_random, PyTorch removes random draws that nothing reads.
    without_drops = inductor_config().patch(fallback_random=True)
    prepared = composites_prepared_for(program)
    with without_drops, prepared, strides_of_kernels():
        program = decomposed(program, table)
    drop_empty_operands(program.graph)
    tidy_draws(program)
    device = device_of(program)
    if not is_on_host(device):
        move_in_program(program, device)
    # The example inputs would keep the arguments and their autograd graph alive.
    program.example_inputs = None
    return program


def _name_buffers_once(program: ExportedProgram) -> None:
    """Deduplicate the inputs of a buffer that is registered under two names."""
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    held = {**program.constants, **program.state_dict}
    first: dict[int, torch.fx.Node] = {}
    kept = []
    for spec in program.graph_signature.input_specs:
        key = id(held[spec.target or ""]) if spec.kind is InputKind.BUFFER else None
        if key is not None and key in first:
            nodes[spec.arg.name].replace_all_uses_with(first[key])
            program.graph.erase_node(nodes[spec.arg.name])
            continue
        if key is not None:
            first[key] = nodes[spec.arg.name]
        kept.append(spec)
    if len(kept) < len(program.graph_signature.input_specs):
        program.graph_signature.input_specs = kept
        program.graph_module.recompile()
