"""Constants that forward makes on the CPU in a model on another device.

Libraries of models compute bucket numbers, masks and scales on the CPU and move them, or let an
operator on a GPU read a number from there. What depends on no input is computed once, by the
operators of the CPU, whose rounding decides the values, and becomes a constant on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from tvmbridge.core.torch_private import OpOverload

# Elements of results that are kept.
_MOST = 1 << 26
_CPU = torch.device("cpu")
_SAME_METADATA = torch.ops.aten._assert_tensor_metadata.default
Values = dict[fx.Node, torch.Tensor]


def device_of(program: ExportedProgram) -> torch.device:
    """Where the parameters, buffers and arguments of ``program`` are: where the first of them is
    that is not on the CPU."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT)
    names = {s.arg.name for s in program.graph_signature.input_specs if s.kind in kinds}
    placeholders = program.graph.find_nodes(op="placeholder")
    values = [n.meta.get("val") for n in placeholders if n.name in names]
    devices = [v.device for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in devices if d != _CPU), _CPU)


def move_host_constants(program: ExportedProgram, device: torch.device) -> None:
    """Have ``device`` hold what operators there read of values that are the same at every call and
    are made on the CPU; the functional graph of ``program`` is changed in place."""
    values = _values(program)
    for node in program.graph.find_nodes(op="call_function", target=_SAME_METADATA):
        if node.args[0] in values:
            program.graph.erase_node(node)
    moved: dict[fx.Node, fx.Node] = {}
    for node in list(values):
        users = [user for user in node.users if user not in values and user.op != "output"]
        if not users:
            continue
        moved[node] = _constant(program, values[node].to(device), len(moved), node)
        for user in users:
            user.replace_input_with(node, moved[node])
    if moved:
        _drop_unread(program, values)
        program.graph_module.recompile()


def _values(program: ExportedProgram) -> Values:
    """What nodes on the CPU, and those that move it from there, are at every call."""
    values: Values = {}
    constants = {
        spec.arg.name: program.constants[spec.target or ""]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(constants.get(node.name), torch.Tensor):
            if constants[node.name].device == _CPU:
                values[node] = constants[node.name]
        elif _may_run(node, values):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _CPU}
            with torch.no_grad():
                result = node.target(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                values[node] = result
    return values


def _may_run(node: fx.Node, values: Values) -> bool:
    """Whether an operator makes the same at each call, of what is on the CPU or from nothing."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if not isinstance(value, torch.Tensor) or any(n not in values for n in node.all_input_nodes):
        return False
    if not all(isinstance(n, int) for n in value.shape) or value.numel() > _MOST:
        return False
    return value.device == _CPU or bool(node.all_input_nodes)


def _constant(program: ExportedProgram, value: torch.Tensor, number: int, like: fx.Node) -> fx.Node:
    """A new input of the program that is a constant."""
    specs, placeholders = program.graph_signature.input_specs, _placeholders(program)
    place = next(
        (i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs)
    )
    name = f"host_constant_{number}"
    where = placeholders[place] if place < len(placeholders) else placeholders[-1].next
    with program.graph.inserting_before(where):
        node = program.graph.placeholder(name)
    fake: Any = like.meta["val"]
    with fake.fake_mode:
        node.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    argument = TensorArgument(name=node.name)
    specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, argument, node.name))
    program.constants[node.name] = value
    return node


def _drop_unread(program: ExportedProgram, values: Values) -> None:
    """Erase what was computed, and constants that nothing reads any more."""
    specs = program.graph_signature.input_specs
    for node in reversed(list(values)):
        if node.users:
            continue
        if node.op == "placeholder":
            specs[:] = [spec for spec in specs if spec.arg.name != node.name]
        program.graph.erase_node(node)


def _placeholders(program: ExportedProgram) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="placeholder"))
