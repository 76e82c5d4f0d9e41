"""Capture: a module and a sample input become a functional graph with every input described."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tvmbridge.core.assumptions import Answer
from tvmbridge.core.errors import CaptureError, NotApartError, UnsupportedOperatorError
from tvmbridge.core.libraries import register_caches
from tvmbridge.core.structure import children
from tvmbridge.core.torch_private import inductor_config, pytree
from tvmbridge.core.types import (
    Assumptions,
    CallingConvention,
    CapturedGraph,
    Epilogue,
    IntermediateBase,
)
from tvmbridge.graph_capture.epilogue import EpilogueRecorder
from tvmbridge.graph_capture.memory.bases import WithBases
from tvmbridge.graph_capture.noise import find_noise, tidy_draws
from tvmbridge.graph_capture.observe.arguments import ArgumentWatch, watched_forward
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
from tvmbridge.graph_capture.observe.staging import Stage, staged
from tvmbridge.graph_capture.prologue import cut_prologue
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.graph_capture.trace.answers import Answering, buffers_of, small_buffers
from tvmbridge.graph_capture.trace.autocast import refuse_other_dtypes
from tvmbridge.graph_capture.trace.composites import composites_prepared_for
from tvmbridge.graph_capture.trace.conversions import DropoutWithoutEffect
from tvmbridge.graph_capture.trace.decompositions import (
    decomposition_table,
    kept_whole_under_autograd,
)
from tvmbridge.graph_capture.trace.exchanges import ExchangesWritten, exchanges_left_alone
from tvmbridge.graph_capture.trace.functions import functions_replaced
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels
from tvmbridge.graph_capture.trace.old_norms import NormsPutBack
from tvmbridge.graph_capture.trace.reshapes import reshape_instead_of_view
from tvmbridge.graph_capture.trace.standins import (
    as_captured,
    attributes_put_back,
    without_autocast,
    without_hooks,
    without_repetitions,
)

# The program, what became of its arguments, its epilogue, and what it was told of buffers.
_Exported = tuple[ExportedProgram, ArgumentWatch, Epilogue | None, tuple[Answer, ...]]


def normalize_sample(
    sample_input: Any, sample_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of a sample: a tuple is a tuple of arguments, all else is one argument."""
    args = sample_input if type(sample_input) is tuple else (sample_input,)
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise TypeError(
            f"sample_kwargs must be a dict of keyword arguments, not {type(sample_kwargs).__name__}"
        )
    return args, dict(sample_kwargs or {})


def capture(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    needs_grad: bool | None = None,
) -> CapturedGraph:
    """Trace ``module`` with torch.export in the mode it stands in.

    Args:
        module: any traceable module; it is left as it was.
        sample_input: a tensor, or a tuple of positional arguments (nested structures allowed).
        sample_kwargs: keyword arguments of forward.
        needs_grad: whether the graph will be differentiated, which decides what is kept whole;
            by default ``module.training``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
        CaptureError: forward itself refuses the sample, or torch.export cannot capture it; the
            message names the line.
        UnsupportedOperatorError: the graph draws random numbers in a way that cannot be hoisted.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    needs_grad = module.training if needs_grad is None else needs_grad
    register_caches(module)
    with tracing_here():
        try:
            stage = staged(module, args, kwargs, needs_grad)
            return capture_staged(stage, args, kwargs, needs_grad)
        except NotApartError:
            stage = staged(module, args, kwargs, needs_grad, apart=False)
            return capture_staged(stage, args, kwargs, needs_grad)


def capture_staged(
    stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any], needs_grad: bool
) -> CapturedGraph:
    """Trace the module of ``stage``; otherwise as :func:`capture`."""
    module, seen = stage.module, stage.observation
    bases = () if seen is None else seen.sharing.bases
    program, watch, epilogue, answers = _export(stage, args, kwargs, needs_grad, bases)
    if seen is None:
        raise CaptureError(
            f"forward of {type(module).__name__} cannot be watched: "
            f"{first_paragraph(stage.failure)}"
        ) from stage.failure
    leaves, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    inputs, constant_tensors = describe_inputs(module, program, leaves, needs_grad)
    noise = find_noise(program.graph)
    convention = CallingConvention(
        in_spec=in_spec,
        out_spec=seen.structure if epilogue is None else children(seen.structure)[0],
        changed_arguments=watch.changed,
        assigned=seen.assigned,
        bases=bases,
        checks=watch.checks,
    )
    assumptions = Assumptions(
        training=module.training,
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
        aliases=find_aliases(module),
        values=seen.values,
        outside=seen.outside,
        foreign=seen.foreign,
        asks=seen.asks,
        normed=seen.normed,
        answers=answers,
        is_compiling=stage.is_compiling,
    )
    return CapturedGraph(
        program=program,
        inputs=inputs,
        outputs=with_aliases(describe_outputs(program), seen),
        noise=noise,
        constant_tensors=constant_tensors,
        convention=convention,
        assumptions=assumptions,
        prologue=cut_prologue(program.graph, noise, constant_tensors),
        epilogue=epilogue,
    )


def _export(
    stage: Stage,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    bases: Sequence[IntermediateBase],
) -> _Exported:
    try:
        return _exported(stage, args, kwargs, needs_grad, bases)
    except CaptureError:
        raise
    except Exception as error:
        module = stage.module
        raise_if_forward_refuses(module, args, kwargs)
        if "torch._C.Generator" in str(error):  # PyTorch 2.11 cannot trace an operator given one
            raise UnsupportedOperatorError(OWN_GENERATOR) from error
        line = user_line(error) or "an unknown line"
        raise CaptureError(
            f"torch.export cannot capture {type(module).__name__}; it stopped at {line}: "
            f"{first_paragraph(error)}"
        ) from error


def _exported(
    stage: Stage,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    bases: Sequence[IntermediateBase],
) -> _Exported:
    """The program and what became of forward in it; errors are torch.export's."""
    module = stage.module
    table = decomposition_table(differentiated=needs_grad or module.training)
    with (
        # torch.export puts copies of containers back, one for each module that shares one.
        attributes_put_back(module),
        torch.set_grad_enabled(needs_grad),
        without_autocast(),
        without_hooks(module),
        kept_whole_under_autograd(),
        warnings.catch_warnings(),
    ):
        # torch.export copies its own tree specs in a way that torch deprecates.
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)
        with DropoutWithoutEffect(), exchanges_left_alone(), functions_replaced(module):
            # Only now is forward what is to be traced.
            traced = as_captured(stage.is_compiling)(NormsPutBack(module))
            watch = ArgumentWatch(ExchangesWritten(traced, module))
            asked = Answering(watch, small_buffers(module), lambda: buffers_of(module))
            epilogues = EpilogueRecorder(asked, differentiated=needs_grad)
            with watched_forward(module, WithBases(epilogues, bases)):
                given, named = without_repetitions((args, dict(kwargs)))
                program = torch.export.export(module, given, named, strict=False)
        return _taken_apart(program, table), watch, epilogues.epilogue, asked.answers


def _taken_apart(program: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """``program`` in functional operators that ``table`` has no parts for."""
    _name_buffers_once(program)
    refuse_other_dtypes(program)
    reshape_instead_of_view(program)
    # Without it PyTorch drops draws that nothing reads.
    without_drops = inductor_config().patch(fallback_random=True)
    with without_drops, composites_prepared_for(program), strides_of_kernels():
        program = program.run_decompositions(table)
    tidy_draws(program)
    # It would keep the arguments alive, and what autograd has recorded of them.
    program.example_inputs = None
    return program


def _name_buffers_once(program: ExportedProgram) -> None:
    """Leave one input for a buffer that has two names, of which one must not be written alone."""
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
