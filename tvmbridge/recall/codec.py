"""Plain JSON for the descriptions of graphs and code: a closed set of types, checked when read.

A value becomes a JSON constant or a list whose first item names its type. Only the types listed
here can be written or read, so a file cannot create objects of other classes. A class that a pytree
structure names must be loaded already and be registered with PyTorch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list

from tvmbridge.calls.layouts import Layout
from tvmbridge.compiler.laying_out import Layouts
from tvmbridge.compiler.readers import Readers
from tvmbridge.core.assumptions import Question
from tvmbridge.core.captured_graph import CallingConvention
from tvmbridge.core.structure import children
from tvmbridge.core.torch_private import OpOverload, pytree
from tvmbridge.core.types import (
    InputDescriptor,
    InputKind,
    IntermediateBase,
    NoiseDescriptor,
    OutputAlias,
    OutputDescriptor,
    OutputKind,
    TensorSpec,
    ValueDescriptor,
    ViewStep,
)
from tvmbridge.passes.relax.return_whole import Whole
from tvmbridge.recall.describe import UndescribableError

_RECORDS: tuple[type[Any], ...] = (
    CallingConvention,
    InputDescriptor,
    IntermediateBase,
    Layout,
    Layouts,
    NoiseDescriptor,
    OutputAlias,
    OutputDescriptor,
    Readers,
    TensorSpec,
    ValueDescriptor,
    ViewStep,
    Whole,
)
_ENUMS: tuple[type[enum.Enum], ...] = (InputKind, OutputKind, Question)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_ATEN = "aten."


def encode(value: Any) -> Any:
    """Return ``value`` as plain JSON.

    Raises:
        UndescribableError: ``value`` holds something of a type that has no JSON form here.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, str) and kind.__module__.startswith("tvm_ffi"):
        return str(value)
    if kind is float:
        return ["float", value.hex()]
    if kind in (tuple, list, immutable_list):
        return ["tuple" if kind is tuple else "list", *map(encode, value)]
    if kind is frozenset:
        return ["frozenset", *sorted(map(encode, value), key=repr)]
    if kind is torch.Size:
        return ["size", *value]
    if isinstance(value, Mapping) and kind in (dict, types.MappingProxyType):
        return ["dict", *(encode(each) for pair in value.items() for each in pair)]
    if isinstance(value, _OF_TORCH):
        return ["torch", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    if kind in _ENUMS:
        return ["enum", kind.__name__, value.name]
    if isinstance(value, OpOverload) and str(value).startswith(_ATEN):
        return ["operator", str(value)]
    if kind in _RECORDS:
        names = [field.name for field in dataclasses.fields(kind)]
        return ["record", kind.__name__, *(encode(getattr(value, name)) for name in names)]
    if isinstance(value, pytree.TreeSpec):
        return _encoded_structure(value)
    raise UndescribableError(f"a {kind.__module__}.{kind.__qualname__} in the description")


def _encoded_structure(spec: Any) -> Any:
    if spec.is_leaf():
        return ["leaf"]
    head = ["tree", _encoded_class(spec.type), _encoded_context(spec.context)]
    return [*head, *map(_encoded_structure, children(spec))]


def _encoded_context(context: Any) -> Any:
    """Encode the context of a structure; it may hold classes."""
    if isinstance(context, type):
        return ["class", _encoded_class(context)]
    if type(context) in (tuple, list):
        return [type(context).__name__, *map(_encoded_context, context)]
    return encode(context)


def _encoded_class(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_named(name) is not kind:
        raise UndescribableError(f"the class {kind.__qualname__}, which no name leads to")
    return name


def decode(content: Any) -> Any:
    """Return the value that :func:`encode` has made ``content`` of.

    Raises:
        ValueError: ``content`` is of another form.
    """
    if content is None or type(content) in (bool, int, str):
        return content
    if type(content) is not list or not content or type(content[0]) is not str:
        raise ValueError("it is no encoded value")
    reader = _READERS.get(content[0])
    if reader is None:
        raise ValueError(f"it has the unknown type {content[0]!r}")
    return reader(content[1:])


def decode_as(hint: Any, content: Any) -> Any:
    """Return the decoded ``content``, which must fit the type annotation ``hint``.

    Raises:
        ValueError: it does not.
    """
    value = decode(content)
    if not fits(value, hint):
        raise ValueError(f"a {type(value).__name__} is where {hint} is expected")
    return value


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the annotated type ``hint``, of which the forms used here are known."""
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        if len(inner) == 2 and inner[1] is ...:
            return all(fits(each, inner[0]) for each in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if origin in (list, frozenset):
        return type(value) is origin and all(fits(each, inner[0]) for each in value)
    if origin is not None and issubclass(origin, Mapping):
        return type(value) is dict and all(
            fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items()
        )
    return type(value) is hint if hint in (bool, int, float, str) else isinstance(value, hint)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _record(content: Sequence[Any]) -> Any:
    kind = next((c for c in _RECORDS if content and c.__name__ == content[0]), None)
    fields = () if kind is None else dataclasses.fields(kind)
    if kind is None or len(fields) != len(content) - 1:
        raise ValueError("it is no record")
    known: Any = kind
    hints = _hints(known)
    pairs = zip(fields, content[1:], strict=True)
    return kind(**{field.name: decode_as(hints[field.name], each) for field, each in pairs})


def _enum(content: Sequence[Any]) -> enum.Enum:
    name, member = content
    kind = next((c for c in _ENUMS if c.__name__ == name), None)
    if kind is None or type(member) is not str or member not in kind.__members__:
        raise ValueError("it is no member of an enumeration")
    return kind[member]


def _torch(content: Sequence[Any]) -> Any:
    (name,) = content
    value = vars(torch).get(name) if type(name) is str else None
    if not isinstance(value, _OF_TORCH):
        raise ValueError(f"PyTorch has no constant {name!r}")
    return value


def _device(content: Sequence[Any]) -> torch.device:
    (name,) = content
    if type(name) is not str or not _DEVICE.fullmatch(name):
        raise ValueError("it is no device that code is compiled for")
    return torch.device(name)


def _operator(content: Sequence[Any]) -> Any:
    (name,) = content
    parts = name.split(".") if type(name) is str else ()
    if len(parts) != 3 or not all(part.isidentifier() for part in parts) or parts[0] != "aten":
        raise ValueError("it is no operator of ATen")
    found = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None)
    if not isinstance(found, OpOverload):
        raise ValueError(f"PyTorch has no operator {name}")
    return found


def _float(content: Sequence[Any]) -> float:
    (text,) = content
    return float.fromhex(text) if type(text) is str else _refused()


def _refused() -> Any:
    raise ValueError("it is no text")


def _dict(content: Sequence[Any]) -> dict[Any, Any]:
    if len(content) % 2:
        raise ValueError("a key has no value")
    values = list(map(decode, content))
    return dict(zip(values[::2], values[1::2], strict=True))


def _size(content: Sequence[Any]) -> torch.Size:
    if not all(type(each) is int for each in content):
        raise ValueError("it is no size")
    return torch.Size(content)


def _tree(content: Sequence[Any]) -> Any:
    kind, context = _node(content[0]), _context(content[1])
    specs = [decode(each) for each in content[2:]]
    if not all(isinstance(each, pytree.TreeSpec) for each in specs):
        raise ValueError("it is no structure")
    return pytree.TreeSpec(kind, context, specs)


def _node(name: Any) -> type:
    kind = _class_named(name)
    if kind not in pytree.SUPPORTED_NODES:
        raise ValueError(f"{name!r} is no class that PyTorch can flatten")
    return kind


def _context(content: Any) -> Any:
    if type(content) is list and content[:1] == ["class"]:
        kind = _class_named(*content[1:])
        if kind is None:
            raise ValueError(f"there is no class {content[1:]}")
        return kind
    if type(content) is list and content and content[0] in ("tuple", "list"):
        made: Callable[[Any], Any] = tuple if content[0] == "tuple" else list
        return made(map(_context, content[1:]))
    return decode(content)


def _class_named(name: Any) -> Any:
    """Return the class of this name in a module that is loaded; None if there is none."""
    if type(name) is not str or name.count(":") != 1:
        return None
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # No attribute hook of a module runs: the name must be there.
        found = None if found is None else vars(found).get(part)
        if not isinstance(found, type):
            return None
    return found


def _leaf(content: Sequence[Any]) -> Any:
    if content:
        raise ValueError("a leaf has no parts")
    return pytree.tree_flatten(0)[1]


_READERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "float": _float,
    "tuple": lambda content: tuple(map(decode, content)),
    "list": lambda content: list(map(decode, content)),
    "frozenset": lambda content: frozenset(map(decode, content)),
    "size": _size,
    "dict": _dict,
    "torch": _torch,
    "device": _device,
    "enum": _enum,
    "operator": _operator,
    "record": _record,
    "leaf": _leaf,
    "tree": _tree,
}
