"""Places of Python numbers: attributes of modules, and entries of the containers in them.

A key names a place: the submodule's name, the attribute's name, then one step for each container
on the way, such as ``("", "config", (".", "loss"), ("[", "beta"))`` for
``config.loss["beta"]``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import WrapperDescriptorType
from typing import Any, TypeAlias

from torch import nn

from tvmbridge.core.contents import (
    DEPTH,
    MISSING,
    AnyNumber,
    PartOf,
    attributes_of,
    deeper,
    is_constant,
    same_value,
    state_of,
)
from tvmbridge.core.number_inputs import is_number
from tvmbridge.core.types import NumberKey

# ("[", key) is an item of a dict, list or tuple, and (".", name) an attribute of an object.
Step: TypeAlias = tuple[str, Any]


def label_of(key: NumberKey) -> str:
    """Return the name of a place, as Python code would write it without ``self``."""
    path, attribute, *steps = key
    inside = (f".{name}" if kind == "." else f"[{name!r}]" for kind, name in steps)
    return ".".join(filter(None, (path, attribute))) + "".join(inside)


def number_in(owner: nn.Module, names: NumberKey) -> Any:
    """Return what a place of ``owner`` holds; MISSING if there is no such place.

    Args:
        names: the key of the place without the submodule's name.
    """
    value = vars(owner).get(names[0], MISSING)
    for step in names[1:]:
        value = _inside(value, step)
    return value


def set_number_in(owner: nn.Module, names: NumberKey, number: Any) -> None:
    """Set a place of ``owner``, which exists, to ``number``."""
    if len(names) == 1:
        vars(owner)[names[0]] = number
        return
    value, (kind, name) = container_of(owner, names), names[-1]
    if kind == ".":
        _attributes(value)[name] = number
    elif isinstance(value, dict):
        dict.__setitem__(value, name, number)
    elif type(value) is list and name < len(value):
        value[name] = number


def container_of(owner: nn.Module, names: NumberKey) -> Any:
    """Return the object that holds the number at a place; None for an attribute of ``owner``."""
    return number_in(owner, names[:-1]) if len(names) > 1 else None


def is_set_plainly(container: Any) -> bool:
    """Whether code that assigns to a place in ``container`` runs no method of a user's class."""
    if isinstance(container, dict):
        return type(container) is dict
    # A class in C, such as SimpleNamespace, has a wrapper of its own.
    return isinstance(type(container).__setattr__, WrapperDescriptorType)


def dicts_to(owner: nn.Module, names: NumberKey) -> list[tuple[dict[Any, Any], Any]]:
    """Return the dictionaries on the way to a place, each with its key."""
    found: list[tuple[dict[Any, Any], Any]] = [(vars(owner), names[0])]
    value = vars(owner).get(names[0], MISSING)
    for kind, name in names[1:]:
        held = _attributes(value) if kind == "." else value
        found += [(held, name)] if isinstance(held, dict) else []
        value = _inside(value, (kind, name))
    return found


def numbers_changed(now: Any, expected: Any, depth: float = DEPTH) -> list[NumberKey] | None:
    """Return the steps to each number in ``now`` that differs from the expected one.

    Return None if anything else differs.
    """
    if same_value(now, expected, depth):
        return []
    if is_number(now) and is_number(expected):
        return [()]
    if isinstance(expected, PartOf):
        if type(now) is not expected.kind:
            return None
        names = {(".", name): each for name, each in expected.attributes.items()}
        ours = {step: expected.found(now, step[1]) for step in names}
    else:
        ours, names = dict(_parts(now)), dict(_parts(expected))
        if type(now) is not type(expected) or list(ours) != list(names):
            return None
    found: list[NumberKey] = []
    inside = deeper(expected, depth)
    for step, each in names.items():
        if same_value(ours[step], each, inside):
            continue
        further = numbers_changed(ours[step], each, inside)
        if further is None or _inside(now, step) is not ours[step]:
            return None
        found += [(step, *steps) for steps in further]
    return found or None


def marked_places(values: Mapping[Any, Any]) -> dict[str, list[NumberKey]]:
    """Return the keys of all places of an :class:`AnyNumber` in expected values, by its name."""
    found: dict[str, list[NumberKey]] = {}
    for key, value in values.items():
        for mark, steps in _marks(value, DEPTH, ()):
            found.setdefault(mark.name, []).append((*key, *steps))
    return found


def _marks(
    value: Any, depth: float, around: Collection[int]
) -> Iterator[tuple[AnyNumber, NumberKey]]:
    if isinstance(value, AnyNumber):
        yield value, ()
    elif depth > 0 and id(value) not in around:
        for step, each in _parts(value):
            for mark, steps in _marks(each, deeper(value, depth), (*around, id(value))):
                yield mark, (step, *steps)


def _parts(value: Any) -> list[tuple[Step, Any]]:
    """Return the items and attributes of a container or plain object, each with its step."""
    if isinstance(value, PartOf):
        return [((".", name), each) for name, each in value.attributes.items()]
    if is_constant(value) or isinstance(value, nn.Module | tuple | type) or not state_of(value):
        return []
    if type(value) is list:
        return [(("[", i), each) for i, each in enumerate(value)]
    items = dict.items(value) if isinstance(value, dict) else ()
    attributes = {} if type(value) is dict else attributes_of(value)
    return [
        *((("[", key), each) for key, each in items),
        *(((".", name), each) for name, each in attributes.items()),
    ]


def _inside(value: Any, step: Step) -> Any:
    kind, name = step
    if kind == ".":
        return _attributes(value).get(name, MISSING)
    if isinstance(value, dict):
        return dict.get(value, name, MISSING)
    return value[name] if type(value) is list and name < len(value) else MISSING


def _attributes(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of ``value`` without its class's own look-up."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
