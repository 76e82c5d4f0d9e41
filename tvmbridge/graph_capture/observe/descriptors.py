"""Describe the inputs and outputs of an exported program: kinds, names, specs, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputSpec, TensorArgument
from torch.export.graph_signature import InputKind as ExportInputKind
from torch.export.graph_signature import OutputKind as ExportOutputKind

from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.errors import (
    CaptureError,
    DataDependentError,
    NotApartError,
    UnsupportedOperatorError,
)
from tvmbridge.core.number_inputs import with_tensors
from tvmbridge.core.torch_private import make_contiguous_strides_for
from tvmbridge.core.types import (
    InputDescriptor,
    InputKind,
    OutputDescriptor,
    OutputKind,
    TensorSpec,
)
from tvmbridge.graph_capture.observe.observation import Observation


def _fake_values(program: ExportedProgram) -> dict[str, torch.Tensor]:
    return {n.name: n.meta["val"] for n in program.graph.nodes if "val" in n.meta}


OWN_GENERATOR = "forward draws from a torch.Generator of its own, which compiled code does not move"

_INPUT_KINDS = {
    ExportInputKind.PARAMETER: InputKind.PARAMETER,
    ExportInputKind.BUFFER: InputKind.BUFFER,
    ExportInputKind.CONSTANT_TENSOR: InputKind.CONSTANT,
    ExportInputKind.USER_INPUT: InputKind.USER,
}


def describe_inputs(
    module: nn.Module, program: ExportedProgram, leaves: list[Any], needs_grad: bool
) -> tuple[tuple[InputDescriptor, ...], dict[str, torch.Tensor]]:
    """Describe the inputs of ``program``.

    Returns:
        The descriptors, in the order user inputs, parameters, buffers, other tensor attributes,
        constants; and the constant tensors by the names of their placeholders.

    Raises:
        UnsupportedOperatorError: the bridge does not handle an input, or a complex input requires
            a gradient and ``needs_grad`` is set.
        NotApartError: forward reaches a tensor of the user's module by another reference than the
            stand-in, the copy that is traced.
        CaptureError: the inputs are on several devices.
    """
    values, leaves = _fake_values(program), with_tensors(leaves)
    described: list[InputDescriptor] = []
    constants: dict[str, torch.Tensor] = {}
    position = -1
    state = (*module.named_parameters(), *module.named_buffers())
    owned = {t.data_ptr(): name for name, t in state if type(t) in (torch.Tensor, nn.Parameter)}
    named = {id(t): name for name, t in reversed(tensors_of(module).items())}
    moved = _moved_parameters(module, program)
    for spec in program.graph_signature.input_specs:
        kind = _INPUT_KINDS.get(spec.kind)
        if kind is InputKind.USER:
            position += 1
        if isinstance(spec.arg, ConstantArgument):
            continue
        if getattr(spec.arg, "class_fqn", "") == "torch._C.Generator":
            raise UnsupportedOperatorError(OWN_GENERATOR)
        if kind is None or not isinstance(spec.arg, TensorArgument):
            raise UnsupportedOperatorError(
                f"the graph has an input of kind {spec.kind.name} ({spec.arg}), "
                "which the bridge does not handle"
            )
        target = spec.target
        if kind is InputKind.PARAMETER and target in moved:
            kind = InputKind.BUFFER
        if kind is InputKind.CONSTANT:
            tensor = program.constants[spec.target or ""]
            target = named.get(id(tensor))
            if target is None:
                if tensor.numel() and tensor.data_ptr() in owned:
                    reached = owned[tensor.data_ptr()]
                    raise NotApartError(f"forward reaches {reached} past the module")
                constants[spec.arg.name] = tensor
            else:
                kind = InputKind.ATTRIBUTE
        described.append(_describe_input(module, spec, kind, target, values, leaves, position))
    order = list(InputKind)
    if needs_grad:
        _refuse_complex_gradients(described)
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
    elif kind is InputKind.ATTRIBUTE:
        path, _, name = (target or "").rpartition(".")
        requires_grad = getattr(module.get_submodule(path), name).requires_grad
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


def _refuse_complex_gradients(inputs: list[InputDescriptor]) -> None:
    for each in inputs:
        if each.requires_grad and each.spec.dtype.is_complex:
            raise UnsupportedOperatorError(
                f"{each.target or each.name} is of {each.spec.dtype} and requires a gradient; keep "
                "it as real numbers (torch.view_as_real), and call torch.view_as_complex in forward"
            )


def _check_one_device(inputs: list[InputDescriptor]) -> None:
    devices = {str(d.spec.device) for d in inputs}
    if len(devices) > 1:
        raise CaptureError(
            f"inputs, parameters and buffers live on several devices ({', '.join(sorted(devices))})"
            "; move the module and the sample to one device"
        )


def _moved_parameters(module: nn.Module, program: ExportedProgram) -> set[str]:
    """Return the names of the frozen parameters that forward writes, such as moving averages.

    The bridge treats these parameters as buffers.

    Raises:
        UnsupportedOperatorError: forward writes a parameter that requires a gradient.
    """
    written = {
        spec.target or ""
        for spec in program.graph_signature.output_specs
        if spec.kind is ExportOutputKind.PARAMETER_MUTATION
    }
    for name in sorted(written):
        if module.get_parameter(name).requires_grad:
            raise UnsupportedOperatorError(
                f"forward writes into the parameter {name}; compiled code writes only into "
                "buffers, frozen parameters and arguments: write it outside of forward"
            )
    return written


def describe_outputs(
    program: ExportedProgram, device: torch.device | None
) -> tuple[OutputDescriptor, ...]:
    """Describe the values that forward returns and the tensors that it writes.

    Raises:
        UnsupportedOperatorError: the bridge does not handle one of these outputs.
        DataDependentError: an output is a number computed from tensors, or its shape is not known.
        CaptureError: an output is not on ``device``.
    """
    values = _fake_values(program)
    kinds = {
        ExportOutputKind.USER_OUTPUT: OutputKind.USER,
        ExportOutputKind.BUFFER_MUTATION: OutputKind.BUFFER_MUTATION,
        ExportOutputKind.PARAMETER_MUTATION: OutputKind.BUFFER_MUTATION,
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
        if device is not None and tensor_spec.device != device:
            raise CaptureError(
                f"forward returns a tensor on {tensor_spec.device}, where its inputs, parameters "
                f"and buffers are on {device}: compiled code is for one device"
            )
        outputs.append(OutputDescriptor(kind, name, tensor_spec, spec.target))
    return tuple(outputs)


def with_aliases(
    outputs: tuple[OutputDescriptor, ...], seen: Observation
) -> tuple[OutputDescriptor, ...]:
    """Return the outputs with the strides and the memory sharing that ``seen`` has for them.

    Raises:
        CaptureError: the observed run returned another number of values.
    """
    results = sum(o.kind is OutputKind.USER for o in outputs)
    expected = [*seen.sharing.aliases, *(None for _ in seen.sharing.bases)]
    if results != len(expected):
        raise CaptureError(
            f"run again, forward returns {len(expected)} values, captured as {results}"
        )
    strides = [*seen.strides, *(None for _ in seen.sharing.bases)]
    observed = iter(zip(expected, strides, strict=True))
    described = []
    for output in outputs:
        if output.kind is OutputKind.USER:
            alias, stride = next(observed)
            described.append(replace(output, alias=alias, spec=_laid_out(output.spec, stride)))
        elif output.target is not None and output.target in seen.rebound:
            alias = seen.sharing.exchanged.get(output.target)
            spec = _laid_out(output.spec, seen.rebound[output.target])
            described.append(replace(output, rebinds=True, alias=alias, spec=spec))
        else:
            described.append(output)
    return tuple(described)


def _laid_out(spec: TensorSpec | None, stride: tuple[int, ...] | None) -> TensorSpec | None:
    if spec is None:
        return None
    return replace(spec, stride=stride or make_contiguous_strides_for(spec.shape))


def _output_spec(name: str, value: Any) -> TensorSpec:
    """Return the spec of a result; raise unless it is a real tensor whose shape is known."""
    if not isinstance(value, torch.Tensor):
        raise DataDependentError(
            f"the result {name} is a number that is computed from the values of tensors"
        )
    if value.is_complex() and not runs_alone():
        raise UnsupportedOperatorError(f"the result {name} is of {value.dtype}")
    if not all(isinstance(extent, int) for extent in value.shape):
        raise DataDependentError(f"the shape of the result {name} depends on data")
    return TensorSpec.of(value)


def find_aliases(module: nn.Module) -> dict[str, str]:
    """Map each dotted name whose tensor has an earlier name, too (tied weights), to that name."""
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
