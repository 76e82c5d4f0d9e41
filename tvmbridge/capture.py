"""Capture: a module and a sample input become a functional graph with every input described."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputSpec, TensorArgument
from torch.export.graph_signature import InputKind as ExportInputKind
from torch.export.graph_signature import OutputKind as ExportOutputKind
from torch.utils import _pytree as pytree

from tvmbridge.arguments import ArgumentWatch, watched_forward
from tvmbridge.conversions import DropoutWithoutEffect, conversions_without_effect
from tvmbridge.cumulative import cumulative_averages_on_tensors
from tvmbridge.decompositions import decomposition_table, kept_whole_under_autograd
from tvmbridge.errors import CaptureError, UnsupportedOperatorError
from tvmbridge.fills import FillsByMask
from tvmbridge.head import cut_head
from tvmbridge.libraries import register_caches
from tvmbridge.noise import find_noise, tidy_draws
from tvmbridge.observation import NotApartError, Observation, Stage, staged
from tvmbridge.promotion import KernelPromotion
from tvmbridge.refusal import (
    first_paragraph,
    raise_if_forward_refuses,
    user_line,
)
from tvmbridge.standins import tensors_of, without_autocast
from tvmbridge.tail import Tail, TailWatch
from tvmbridge.types import (
    CapturedGraph,
    InputDescriptor,
    InputKind,
    OutputDescriptor,
    OutputKind,
    TensorSpec,
)
from tvmbridge.whole import FunctionsKeptWhole

logger = logging.getLogger(__name__)


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
    program, watch, tail = _export(module, args, kwargs, needs_grad)
    if seen is None:
        raise CaptureError(
            f"forward of {type(module).__name__} cannot be watched: "
            f"{first_paragraph(stage.failure)}"
        ) from stage.failure
    leaves, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    inputs, constant_tensors = _describe_inputs(module, program, leaves)
    noise = find_noise(program.graph)
    return CapturedGraph(
        program=program,
        training=module.training,
        in_spec=in_spec,
        out_spec=seen.structure if tail is None else _first_of(seen.structure),
        inputs=inputs,
        outputs=_with_aliases(_describe_outputs(program), seen),
        noise=noise,
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
        constant_tensors=constant_tensors,
        aliases=_find_aliases(module),
        values=seen.values,
        changed_arguments=watch.changed,
        checks=watch.checks,
        head=cut_head(program.graph, noise, constant_tensors),
        tail=tail,
    )


def _first_of(structure: pytree.TreeSpec) -> pytree.TreeSpec:
    """The structure of the first of a pair."""
    pair = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    return pytree.tree_structure(pair[0])


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], needs_grad: bool
) -> tuple[ExportedProgram, ArgumentWatch, Tail | None]:
    table = decomposition_table(differentiated=needs_grad or module.training)
    try:
        with (
            torch.set_grad_enabled(needs_grad),
            without_autocast(),
            kept_whole_under_autograd(),
            warnings.catch_warnings(),
        ):
            # torch.export copies its own tree specs in a way that torch deprecates.
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)
            with (
                cumulative_averages_on_tensors(module),
                conversions_without_effect(),
                DropoutWithoutEffect(),
                KernelPromotion(),
                FunctionsKeptWhole(),
                FillsByMask(),
            ):
                # Only now is forward what is to be traced.
                watch = ArgumentWatch(module.forward)
                tails = TailWatch(watch, differentiated=needs_grad)
                with watched_forward(module, tails):
                    program = torch.export.export(module, args, dict(kwargs), strict=False)
            # Without it PyTorch drops draws that nothing reads.
            with torch._inductor.config.patch(fallback_random=True):
                program = program.run_decompositions(table)
            tidy_draws(program)
            return program, watch, tails.tail
    except CaptureError:
        raise
    except Exception as error:
        raise_if_forward_refuses(module, args, kwargs)
        line = user_line(error) or "an unknown line"
        raise CaptureError(
            f"torch.export cannot capture {type(module).__name__}; it stopped at {line}: "
            f"{first_paragraph(error)}"
        ) from error


def _fake_values(program: ExportedProgram) -> dict[str, torch.Tensor]:
    return {n.name: n.meta["val"] for n in program.graph.nodes if "val" in n.meta}


_INPUT_KINDS = {
    ExportInputKind.PARAMETER: InputKind.PARAMETER,
    ExportInputKind.BUFFER: InputKind.BUFFER,
    ExportInputKind.CONSTANT_TENSOR: InputKind.CONSTANT,
    ExportInputKind.USER_INPUT: InputKind.USER,
}


def _describe_inputs(
    module: nn.Module, program: ExportedProgram, leaves: list[Any]
) -> tuple[tuple[InputDescriptor, ...], dict[str, torch.Tensor]]:
    """Descriptors ordered user inputs, parameters, buffers, constants; and the constants."""
    values = _fake_values(program)
    described: list[InputDescriptor] = []
    constants: dict[str, torch.Tensor] = {}
    position = -1
    state = (*module.named_parameters(), *module.named_buffers())
    owned = {t.data_ptr(): name for name, t in state if type(t) in (torch.Tensor, nn.Parameter)}
    named = {id(t): name for name, t in reversed(tensors_of(module).items())}
    for spec in program.graph_signature.input_specs:
        kind = _INPUT_KINDS.get(spec.kind)
        if kind is InputKind.USER:
            position += 1
        if isinstance(spec.arg, ConstantArgument):
            continue
        if getattr(spec.arg, "class_fqn", "") == "torch._C.Generator":
            raise UnsupportedOperatorError(
                "forward draws from a torch.Generator of its own, which compiled code does not move"
            )
        if kind is None or not isinstance(spec.arg, TensorArgument):
            raise UnsupportedOperatorError(
                f"the graph has an input of kind {spec.kind.name} ({spec.arg}), "
                "which the bridge does not handle"
            )
        target = spec.target
        if kind is InputKind.CONSTANT:
            tensor = program.constants[spec.target or ""]
            if tensor.numel() and tensor.data_ptr() in owned:
                raise NotApartError(f"forward reaches {owned[tensor.data_ptr()]} past the module")
            target = named.get(id(tensor))
            if target is None:
                constants[spec.arg.name] = tensor
            else:
                kind = InputKind.ATTRIBUTE
        described.append(_describe_input(module, spec, kind, target, values, leaves, position))
    order = list(InputKind)
    described.sort(key=lambda d: order.index(d.kind))
    _check_one_device(described)
    return tuple(described), constants


def _describe_input(
    module: nn.Module,
    spec: InputSpec,
    kind: InputKind,
    target: str | None,
    values: Mapping[str, torch.Tensor],
    leaves: list[Any],
    position: int,
) -> InputDescriptor:
    requires_grad = False
    if kind is InputKind.PARAMETER:
        requires_grad = module.get_parameter(target or "").requires_grad
    elif kind is InputKind.USER:
        requires_grad = leaves[position].requires_grad
    return InputDescriptor(
        name=spec.arg.name,
        kind=kind,
        spec=TensorSpec.of(values[spec.arg.name]),
        target=target,
        position=position if kind is InputKind.USER else None,
        requires_grad=requires_grad,
    )


def _check_one_device(inputs: list[InputDescriptor]) -> None:
    devices = {str(d.spec.device) for d in inputs}
    if len(devices) > 1:
        raise CaptureError(
            f"inputs, parameters and buffers live on several devices ({', '.join(sorted(devices))})"
            "; move the module and the sample to one device"
        )


def _describe_outputs(program: ExportedProgram) -> tuple[OutputDescriptor, ...]:
    values = _fake_values(program)
    kinds = {
        ExportOutputKind.USER_OUTPUT: OutputKind.USER,
        ExportOutputKind.BUFFER_MUTATION: OutputKind.BUFFER_MUTATION,
        ExportOutputKind.USER_INPUT_MUTATION: OutputKind.INPUT_MUTATION,
    }
    outputs = []
    for spec in program.graph_signature.output_specs:
        kind = kinds.get(spec.kind)
        if kind is None:
            raise UnsupportedOperatorError(
                f"the graph has an output of kind {spec.kind.name}, which the bridge does not "
                "handle"
            )
        if isinstance(spec.arg, ConstantArgument):
            outputs.append(OutputDescriptor(kind, spec.arg.name, None, value=spec.arg.value))
            continue
        name = spec.arg.name
        tensor_spec = _output_spec(name, values[name])
        outputs.append(OutputDescriptor(kind, name, tensor_spec, spec.target))
    return tuple(outputs)


def _with_aliases(
    outputs: tuple[OutputDescriptor, ...], seen: Observation
) -> tuple[OutputDescriptor, ...]:
    """The outputs, with what was observed of the memory that they share."""
    results = sum(o.kind is OutputKind.USER for o in outputs)
    if results != len(seen.aliases):
        raise CaptureError(
            f"run again, forward returns {len(seen.aliases)} values, captured as {results}"
        )
    aliases = iter(seen.aliases)
    described = []
    for output in outputs:
        if output.kind is OutputKind.USER:
            described.append(replace(output, alias=next(aliases)))
        else:
            described.append(replace(output, rebinds=output.target in seen.rebound))
    return tuple(described)


def _output_spec(name: str, value: Any) -> TensorSpec:
    """The spec of a result, which must be a tensor whose shape is known."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedOperatorError(
            f"the result {name} is a number that is computed from the values of tensors"
        )
    if not all(isinstance(extent, int) for extent in value.shape):
        raise UnsupportedOperatorError(f"the shape of the result {name} depends on data")
    return TensorSpec.of(value)


def _find_aliases(module: nn.Module) -> dict[str, str]:
    """Dotted names that share a tensor with an earlier one (tied weights), and that name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return aliases
