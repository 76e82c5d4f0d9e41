"""Compare a module with one that shares its code, by the objects that both hold, without digests.

Layers of a model mostly hold the same objects: classes, functions, a configuration. A *form* names
these objects by their identity. If the forms of two modules are equal, the search for values
outside of the module finds the same values for both. Their present values are compared with the
values at the first search.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.captured_graph import Assumptions
from tvmbridge.core.contents import DEPTH, MISSING, all_held, is_constant, same_value
from tvmbridge.graph_capture.observe.attributes import own_names
from tvmbridge.graph_capture.observe.data import is_of_users
from tvmbridge.recall.describe import Describer

_CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset)
# The key of a plan has the tensors; the form names the submodules.
_HELD = frozenset({"_parameters", "_buffers", "_modules"})


class NoFormError(Exception):
    """A module holds tensors in plain attributes, or containers that are nested too deep."""


@dataclass(frozen=True)
class ModuleForm:
    """The objects that a module and its classes hold.

    - ``tokens``: numbers, texts and types, equal for two modules that hold the same.
    - ``pinned``: the objects that ``tokens`` name by their ids, which must not be used again.
    """

    tokens: Any
    pinned: tuple[Any, ...]


class ByIdentity(Describer):
    """Describes classes by their identity instead of their contents.

    - ``kinds``: the classes that were described.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.kinds: list[type] = []

    def of(self, value: Any) -> str:
        """Return the digest of ``value``."""
        if not isinstance(value, type):
            return super().of(value)
        self.kinds.append(value)
        return f"class {id(value)}"


def form_of(module: nn.Module) -> ModuleForm:
    """Return the form of ``module``.

    Raises:
        NoFormError: it holds something that has no form.
    """
    pinned: list[Any] = []
    modules, kinds = [], dict[type, None]()
    for name, each in module.named_modules():
        kinds |= dict.fromkeys(type(each).__mro__)
        children = tuple((n, child is None) for n, child in each._modules.items())
        held = {n: v for n, v in vars(each).items() if n not in _HELD}
        if each is module:
            held.pop("forward", None)  # the dispatcher
        modules.append((name, id(type(each)), children, _tokens(held, pinned, exact=False)))
    classes = [
        (id(kind), _tokens(dict(vars(kind)), pinned, exact=True))
        for kind in kinds
        if is_of_users(kind)
    ]
    return ModuleForm((modules, classes), (*kinds, *pinned))


def _tokens(held: Mapping[str, Any], pinned: list[Any], *, exact: bool) -> list[Any]:
    """Return the tokens of named values; without ``exact``, of constants only their types.

    Whether a constant of the module has the expected value is compared where forward reads it.
    """
    return [
        (name, type(value) if not exact and is_constant(value) else _token(value, pinned, DEPTH))
        for name, value in held.items()
    ]


def _token(value: Any, pinned: list[Any], depth: float) -> Any:
    kind = type(value)
    if is_constant(value):
        return kind, repr(value)
    if kind in _CONTAINERS:
        if depth <= 0:
            raise NoFormError
        items = (
            [each for pair in value.items() for each in pair] if hasattr(value, "items") else value
        )
        return kind, [_token(each, pinned, depth - 1) for each in items]
    if isinstance(value, torch.Tensor):
        raise NoFormError
    pinned.append(value)
    if kind is types.FunctionType:
        pinned += (value.__code__, value.__defaults__)
        return id(value), id(value.__code__), id(value.__defaults__)
    return id(value)


def is_as_observed(module: nn.Module, assumed: Assumptions) -> bool:
    """Whether attributes of ``module``, and values outside of it, are as ``assumed`` has them."""
    return all(
        same_value(_attribute(module, path, name), expected)
        for (path, name), expected in assumed.values.items()
    ) and all(map(_is_unchanged, assumed.outside))


def _attribute(module: nn.Module, path: str, name: str) -> Any:
    owner = module.get_submodule(path)
    return own_names(owner) if name == "__dict__" else vars(owner).get(name, MISSING)


def _is_unchanged(value: OutsideValue) -> bool:
    found = value.holder.get(value.name, MISSING)
    return found is value.expected if value.itself else same_value(found, value.expected)


def may_be_shared(module: nn.Module, form: ModuleForm, assumed: Assumptions) -> bool:
    """Whether what was found for ``module`` is the same for each module of its form.

    It is not if a value is looked up in ``module`` itself, or if anything holds a module or a
    tensor, which forward may compare with its own.
    """
    own = {id(held) for each in module.modules() for held in (each, vars(each))}
    if any(v.owner is not None or not own.isdisjoint(_places(v)) for v in assumed.outside):
        return False
    found = [*form.pinned, *assumed.values.values(), *(v.expected for v in assumed.outside)]
    return not any(map(_holds_module, found))


def _places(value: OutsideValue) -> tuple[int, int]:
    return value.key[0], id(value.holder)


def _holds_module(value: Any) -> bool:
    held = [getattr(each, "__self__", each) for each in all_held(value)]
    return any(isinstance(each, nn.Module | torch.Tensor) for each in held)
