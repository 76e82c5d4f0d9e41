"""Describe the calling convention of an exported function for its manifest."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.structure import Parts, children
from tvmbridge.core.types import InputDescriptor, InputKind, OutputDescriptor, OutputKind


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def user_inputs(captured: CapturedGraph) -> list[InputDescriptor]:
    """Return the tensors that a call passes, in the order of the graph's inputs."""
    return [d for d in captured.inputs if d.kind is InputKind.USER]


def input_names(captured: CapturedGraph, parameters: Sequence[str]) -> list[str]:
    """Return the name of each user input: its parameter of forward, and its path within it."""
    paths = [path for path, _ in _paths(captured.convention.in_spec)]
    return [_name(paths[d.position or 0], parameters) for d in user_inputs(captured)]


def _paths(spec: Any, front: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if spec.is_leaf():
        yield front, spec
        return
    for key, child in zip(_keys(spec), children(spec), strict=True):
        yield from _paths(child, (*front, key))


def _keys(spec: Any) -> list[Any]:
    """Return the keys of a container's parts: the keys of a dict, otherwise numbers."""
    if spec.type in (dict, OrderedDict) or isinstance(spec.context, list | tuple):
        keys = list(spec.context) if isinstance(spec.context, list | tuple) else []
        if len(keys) == len(children(spec)):
            return keys
    return list(range(len(children(spec))))


def _name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    """Return the name of a path within (args, kwargs): ``hidden_states``, or ``cache.0``."""
    where, *rest = path
    if where == 0 and rest and isinstance(rest[0], int):
        number = rest[0]
        rest[0] = parameters[number] if number < len(parameters) else f"args_{number}"
    return ".".join(map(str, rest))


def described_inputs(captured: CapturedGraph, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return name, shape and dtype of each input."""
    return [
        {"name": name, "shape": list(d.spec.shape), "dtype": dtype_name(d.spec.dtype)}
        for name, d in zip(names, user_inputs(captured), strict=True)
    ]


def returned(captured: CapturedGraph) -> list[OutputDescriptor]:
    """Return all outputs that the code returns to its caller, in order.

    The outputs include tensors that only checks read, and bases that only views read.
    """
    return [o for o in captured.outputs if o.kind is OutputKind.USER]


def described_structure(captured: CapturedGraph, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return the structure of forward's results: containers, constants, and numbers of results.

    Args:
        numbers: the number of each result of the code, by its position among the user's outputs.

    Raises:
        ExportError: forward returns a value that is no tensor, container or plain constant.
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
    if kind is Parts:
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
