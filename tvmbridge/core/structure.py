"""Structures of arguments and results: PyTorch's pytrees, in which a ``torch.Size`` keeps its type.

A result may also be an instance of a dataclass, which is a leaf for PyTorch: see :func:`opened`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.contents import holds_all_in_dict, is_constant, same_value
from tvmbridge.core.symbolic_numbers import SYMBOLIC
from tvmbridge.core.torch_private import pytree

_DICTS = (dict, OrderedDict, defaultdict)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The attributes of an object of class ``kind``, registered as a pytree node.

    - ``values``: the attributes that hold tensors or containers, by name; all fields of a
      dataclass.
    - ``constants``: the attributes of a plain object that hold constants, by name.
    """

    kind: type
    values: Mapping[str, Any]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _flatten(parts: Parts) -> tuple[list[Any], Any]:
    constants = tuple(parts.constants.items())
    return list(parts.values.values()), (parts.kind, tuple(parts.values), constants)


def _flatten_with_keys(parts: Parts) -> tuple[list[Any], Any]:
    values, context = _flatten(parts)
    keys = map(pytree.GetAttrKey, context[1])
    return list(zip(keys, values, strict=True)), context


def _unflatten(values: Any, context: Any) -> Parts:
    kind, names, constants = context
    return Parts(kind, dict(zip(names, values, strict=True)), dict(constants))


pytree.register_pytree_node(
    Parts,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="tvmbridge.Parts",
)

# Replaces a value that contains anything but tensors, constants, containers and plain objects.
UNKNOWN: Any = object()


# Values of a trace. A data-dependent value refuses isinstance: only its type is safe to read.
_TRACED = (torch.Tensor, fx.Proxy, *SYMBOLIC)


def with_parts(value: Any, known: Collection[int], within: tuple[int, ...] = ()) -> Any:
    """Return ``value`` with :class:`Parts` in place of plain objects, or :data:`UNKNOWN`.

    Return :data:`UNKNOWN` if ``value`` contains an object of another kind, itself, or an object
    whose id is in ``known``: that object is older than ``value``. ``within`` has the ids of the
    objects that contain ``value``.
    """
    kind = type(value)
    if issubclass(kind, _TRACED) or is_constant(value):
        return value
    if id(value) in known or id(value) in within:
        return UNKNOWN
    within = (*within, id(value))
    if kind in (list, tuple):
        items = [with_parts(item, known, within) for item in value]
        return UNKNOWN if any(i is UNKNOWN for i in items) else kind(items)
    if kind is dict:
        items = [with_parts(item, known, within) for item in value.values()]
        unknown = any(i is UNKNOWN for i in items) or not all(map(is_constant, value))
        return UNKNOWN if unknown else dict(zip(value, items, strict=True))
    if not holds_all_in_dict(kind):
        return UNKNOWN
    held = vars(value)
    constants = {n: v for n, v in held.items() if is_constant(v)}
    values = {n: with_parts(v, known, within) for n, v in held.items() if n not in constants}
    unknown = any(v is UNKNOWN for v in values.values())
    return UNKNOWN if unknown else Parts(kind, values, constants)


def opened(results: Any, kept: Collection[int] = (), known: Collection[int] = ()) -> Any:
    """Return ``results`` with :class:`Parts` in place of dataclass instances and plain objects.

    A dataclass instance with attributes beside its fields stays. So does a plain object whose id
    is in ``known``: it is older than the results. Containers whose id is in ``kept`` are not
    opened, and stay the same objects.
    """

    def stays(value: Any) -> bool:
        return id(value) in kept or _is_record(value)

    def opens(value: Any) -> bool:
        return id(value) not in kept and (_is_record(value) or _is_object(value))

    def open_one(value: Any) -> Any:
        if not opens(value):
            return value
        if not _is_record(value):
            parts = with_parts(value, known)
            return value if parts is UNKNOWN else parts
        names = [field.name for field in dataclasses.fields(value)]
        values = {name: opened(getattr(value, name), kept, known) for name in names}
        return Parts(type(value), values)

    if not any(map(opens, pytree.tree_leaves(results, is_leaf=stays))):
        return results
    return pytree.tree_map(open_one, results, is_leaf=stays)


def _is_object(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, _TRACED) or is_constant(value):
        return False
    return holds_all_in_dict(kind)


def _is_record(value: Any) -> bool:
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES or not dataclasses.is_dataclass(kind):
        return False
    if issubclass(kind, torch.Tensor | nn.Module | dict | list | tuple):
        return False
    names = {field.name for field in dataclasses.fields(kind)}
    return all(hasattr(value, n) for n in names) and getattr(value, "__dict__", {}).keys() <= names


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Rebuild the structure ``spec`` from ``leaves``, including dataclass instances.

    PyTorch's own ``tree_unflatten`` would return a plain tuple in place of a ``torch.Size``.
    """
    if not _has_own(spec):
        return pytree.tree_unflatten(leaves, spec)
    return _rebuilt(iter(leaves), spec)


def builder_of(spec: Any) -> Callable[[list[Any]], Any]:
    """Return a fast version of :func:`unflatten` for one ``spec``, which is examined only once."""
    if spec.is_leaf():
        return lambda leaves: leaves[0]
    if _has_own(spec) or not all(child.is_leaf() for child in children(spec)):
        return lambda leaves: unflatten(leaves, spec)
    if spec.type in (tuple, list):
        return spec.type
    node, context = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    return lambda leaves: node(leaves, context)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """Return ``structure`` with ``function`` applied to each tensor in it."""
    leaves, spec = pytree.tree_flatten(structure)
    mapped = [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return unflatten(mapped, spec)


def children(spec: Any) -> list[Any]:
    """Return the child specs of a tree spec; PyTorch 2.11 has them under another name."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def same_structure(spec: Any, other: Any) -> bool:
    """Whether two tree specs are equal, and keys of dicts too: ``1`` is another key than True."""
    return bool(spec == other) and _same_keys(spec, other)


def _same_keys(spec: Any, other: Any) -> bool:
    if spec.is_leaf():
        return True
    if spec.type in _DICTS and not same_value(spec.context, other.context):
        return False
    return all(map(_same_keys, children(spec), children(other)))


def _has_own(spec: Any) -> bool:
    if spec.is_leaf():
        return False
    return spec.type in (torch.Size, Parts) or any(_has_own(child) for child in children(spec))


def _rebuilt(leaves: Iterator[Any], spec: Any) -> Any:
    if spec.is_leaf():
        return next(leaves)
    parts = [_rebuilt(leaves, child) for child in children(spec)]
    if spec.type is torch.Size:
        return torch.Size(parts)
    if spec.type is Parts:
        kind, names, constants = spec.context
        return _instance(kind, {**dict(constants), **dict(zip(names, parts, strict=True))})
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


def _instance(kind: type, attributes: Mapping[str, Any]) -> Any:
    """Return an object of class ``kind`` with these attributes, without running ``__init__``."""
    instance: Any = object.__new__(kind)
    if holds_all_in_dict(kind):
        vars(instance).update(attributes)
    else:  # a dataclass with slots
        for name, value in attributes.items():
            object.__setattr__(instance, name, value)
    return instance
