"""Constants that forward computes on the CPU in a model on another device.

Model libraries compute bucket numbers, masks and scales on the CPU and move them to the device, or
let a GPU operator read a number from CPU memory. A value that depends on no input is computed once
and becomes a constant on the device. The CPU's operators compute it, because their rounding
determines the values in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from tvmbridge.graph_capture.constant_nodes import (
    CPU,
    MOST_ELEMENTS,
    is_repeatable,
    run_on_cpu,
)

_CLONE = torch.ops.aten.clone.default
_SAME_METADATA = torch.ops.aten._assert_tensor_metadata.default
Values = dict[fx.Node, torch.Tensor]


def device_of(program: ExportedProgram) -> torch.device:
    """Return the device of the first parameter, buffer or argument off the CPU; else the CPU.

    A program that is given no tensor has the device of those that it creates, as a mask's does.
    """
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT)
    names = {s.arg.name for s in program.graph_signature.input_specs if s.kind in kinds}
    placeholders = program.graph.find_nodes(op="placeholder")
    given = _devices(n for n in placeholders if n.name in names)
    devices = given or _devices(program.graph.nodes)
    return next((d for d in devices if d != CPU), CPU)


def _devices(nodes: Iterable[fx.Node]) -> list[torch.device]:
    values = [node.meta.get("val") for node in nodes]
    return [v.device for v in values if isinstance(v, torch.Tensor)]


def move_in_program(program: ExportedProgram, device: torch.device) -> None:
    """Move constants that ``program`` computes on the CPU to ``device``, where operators read them.

    The functional graph of ``program`` is changed in place.
    """
    specs = program.graph_signature.input_specs
    held = {s.arg.name: s.target or "" for s in specs if s.kind is InputKind.CONSTANT_TENSOR}
    placeholders = program.graph.find_nodes(op="placeholder")
    constants = {n: program.constants[held[n.name]] for n in placeholders if n.name in held}

    def hold(value: torch.Tensor, number: int) -> fx.Node:
        kinds = [spec.kind for spec in specs]
        place = kinds.index(InputKind.USER_INPUT) if InputKind.USER_INPUT in kinds else len(kinds)
        now = list(program.graph.find_nodes(op="placeholder"))
        where = now[place] if place < len(now) else _after(program.graph, now)
        with program.graph.inserting_before(where):
            node = program.graph.placeholder(f"host_constant_{number}")
        argument = TensorArgument(name=node.name)
        specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, argument, node.name))
        program.constants[node.name] = value
        return node

    _move(program.graph, constants, device, hold)
    left = {node.name for node in program.graph.find_nodes(op="placeholder")}
    specs[:] = [s for s in specs if s.arg.name in left or s.arg.name not in held]
    program.graph_module.recompile()


def _after(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> fx.Node:
    """Return the node before which another placeholder belongs."""
    return placeholders[-1].next if placeholders else next(iter(graph.nodes))


def move_in_module(traced: fx.GraphModule, device: torch.device) -> None:
    """Do the same as :func:`move_in_program` for a graph module that holds its constants itself."""
    constants = {n: getattr(traced, str(n.target)) for n in traced.graph.find_nodes(op="get_attr")}

    def hold(value: torch.Tensor, number: int) -> fx.Node:
        name = f"_host_constant_{number}"
        traced.register_buffer(name, value)
        with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
            return traced.graph.get_attr(name)

    _move(traced.graph, constants, device, hold)
    traced.recompile()


def _move(
    graph: fx.Graph,
    constants: Mapping[fx.Node, Any],
    device: torch.device,
    hold: Callable[[torch.Tensor, int], fx.Node],
) -> None:
    values = _values(graph, constants)
    for node in graph.find_nodes(op="call_function", target=_SAME_METADATA):
        if node.args[0] in values:
            graph.erase_node(node)
    moved = 0
    for node in list(values):
        outside = [user for user in node.users if user not in values]
        users = [user for user in outside if user.op != "output"]
        # A returned constant is cloned, so that each call returns a new tensor.
        returned = len(users) < len(outside) and _is_moved(node)
        if not users and not returned:
            continue
        value = values[node].to(device)
        constant = hold(value, moved)
        constant.meta["val"] = _fake(value, node)
        moved += 1
        for user in users:
            user.replace_input_with(node, constant)
        if returned:
            node.target, node.args, node.kwargs = _CLONE, (constant,), {}
    for node in reversed(list(values)):
        if not node.users:
            graph.erase_node(node)


def _is_moved(node: fx.Node) -> bool:
    """Whether a node's result is on another device than the CPU, so that the node moved it."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device != CPU


def _fake(value: torch.Tensor, like: fx.Node) -> torch.Tensor:
    mode = getattr(like.meta.get("val"), "fake_mode", None)
    if mode is None:
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def _values(graph: fx.Graph, constants: Mapping[fx.Node, Any]) -> Values:
    """Return the constants, computed on the CPU, of nodes that run there or move a tensor away."""
    values: Values = {}
    for node in graph.nodes:
        held = constants.get(node)
        if type(held) is torch.Tensor and held.device == CPU:
            values[node] = held
        elif held is None and _may_run(node, values):
            result = run_on_cpu(node, values)
            if result is not None:
                values[node] = result
    return values


def _may_run(node: fx.Node, values: Values) -> bool:
    """Whether a node gives the same result at each call, from constant CPU tensors or from none."""
    if not is_repeatable(node) or any(n not in values for n in node.all_input_nodes):
        return False
    # Once a value has been moved, the device's operators compute with it; they round differently.
    if any(n.meta["val"].device != CPU for n in node.all_input_nodes if "val" in n.meta):
        return False
    value = node.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return False
    small = value.numel() <= MOST_ELEMENTS  # Larger results are computed at each call.
    return small and (value.device == CPU or bool(node.all_input_nodes))
