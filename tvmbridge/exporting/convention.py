"""The calling convention of an exported function, as its manifest has it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.structure import Fields, Parts, children
from tvmbridge.core.types import InputDescriptor, InputKind, OutputDescriptor, OutputKind


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its library's."""
    return str(dtype).removeprefix("torch.")


def user_inputs(captured: CapturedGraph) -> list[InputDescriptor]:
    """The tensors that a call gives, in the order of the graph's inputs."""
    return [d for d in captured.inputs if d.kind is InputKind.USER]


def input_names(captured: CapturedGraph, parameters: Sequence[str]) -> list[str]:
    """The name of each user input: its parameter of forward, and where in it the tensor is.

    Args:
        captured: the graph.
        parameters: names of forward's parameters, in order.
    """
    paths = [path for path, _ in _paths(captured.convention.in_spec)]
    return [_name(paths[d.position or 0], parameters) for d in user_inputs(captured)]


def _paths(spec: Any, front: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if spec.is_leaf():
        yield front, spec
        return
    for key, child in zip(_keys(spec), children(spec), strict=True):
        yield from _paths(child, (*front, key))


def _keys(spec: Any) -> list[Any]:
    """What leads to each part of a container: the keys of a dict, or numbers."""
    if spec.type in (dict, OrderedDict) or isinstance(spec.context, list | tuple):
        keys = list(spec.context) if isinstance(spec.context, list | tuple) else []
        if len(keys) == len(children(spec)):
            return keys
    return list(range(len(children(spec))))


def _name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    """``("args", "kwargs")``'s path as a name: ``hidden_states``, or ``cache.0`` within one."""
    where, *rest = path
    if where == 0 and rest and isinstance(rest[0], int):
        number = rest[0]
        rest[0] = parameters[number] if number < len(parameters) else f"args_{number}"
    return ".".join(map(str, rest))


def described_inputs(captured: CapturedGraph, names: Sequence[str]) -> list[dict[str, Any]]:
    """Name, shape and dtype of each input."""
    return [
        {"name": name, "shape": list(d.spec.shape), "dtype": dtype_name(d.spec.dtype)}
        for name, d in zip(names, user_inputs(captured), strict=True)
    ]


def returned(captured: CapturedGraph) -> list[OutputDescriptor]:
    """The outputs that forward returns, in order, with those that only checks or views read."""
    return [o for o in captured.outputs if o.kind is OutputKind.USER]


def described_structure(captured: CapturedGraph, numbers: Mapping[int, int]) -> dict[str, Any]:
    """What forward returns: containers, constants, and numbers of results of the code.

    Args:
        captured: the graph.
        numbers: of the results, by the place of the output among the user's.

    Raises:
        ExportError: it returns what is no tensor, container or plain constant.
    """
    outputs = returned(captured)
    leaves = iter(range(len(outputs)))

    def describe(spec: Any) -> dict[str, Any]:
        if spec.is_leaf():
            place = next(leaves)
            if place in numbers:
                return {"kind": "output", "number": numbers[place]}
            return {"kind": "constant", "value": _plain(outputs[place].value)}
        parts = [describe(child) for child in children(spec)]
        return {**_container(spec), "parts": parts}

    return describe(captured.convention.out_spec)


def _container(spec: Any) -> dict[str, Any]:
    kind, context = spec.type, spec.context
    name = getattr(kind, "__name__", str(kind))
    if kind in (list, tuple, torch.Size):
        return {"kind": "list" if kind is list else "tuple"}
    if kind in (Fields, Parts):
        return {"kind": "dict", "name": context[0].__name__, "keys": list(map(str, context[1]))}
    if kind is namedtuple:
        keys = list(context._fields)
        return {"kind": "namedtuple", "name": context.__name__, "keys": keys}
    if issubclass(kind, tuple):
        return {"kind": "tuple"}
    keys = _keys(spec)
    ordered = kind is OrderedDict
    return {"kind": "ordered" if ordered else "dict", "name": name, "keys": list(map(str, keys))}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ExportError(
        f"forward returns a {type(value).__name__}, which an exported function cannot hold; return "
        "tensors, numbers, strings and containers of these"
    )
