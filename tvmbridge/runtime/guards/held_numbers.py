"""Numbers in modules that are inputs of compiled code, as tensors of each call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tvmbridge.core.contents import same_value
from tvmbridge.core.number_inputs import NumberRange, as_tensor
from tvmbridge.core.number_places import (
    dicts_to,
    label_of,
    marked_places,
    number_in,
    set_number_in,
)
from tvmbridge.core.types import Key, NumberKey


class HeldNumbers:
    """Looks up the numbers of a module, as zero-dimensional tensors.

    A tensor is made anew when the place has another object than at the last look.

    Args:
        module: the dispatched module.
        held: by the name of an input, the place and the values that the code serves.
        expected: the expected values of attributes. Containers that several modules share have
            marks at several places, which must hold the same number.
    """

    def __init__(
        self,
        module: nn.Module,
        held: Mapping[str, tuple[NumberKey, NumberRange]],
        expected: Mapping[Key, Any],
    ) -> None:
        marked = marked_places(expected) if any(len(key) > 2 for key, _ in held.values()) else {}
        self._held = {
            name: (module.get_submodule(key[0]), key[1:], known)
            for name, (key, known) in held.items()
        }
        self._others = {
            name: [(module.get_submodule(key[0]), key[1:]) for key in marked.get(name, ())]
            for name in held
        }
        self._keys = {name: key for name, (key, _) in held.items()}
        self._labels = {name: f"the attribute {label_of(key)}" for name, (key, _) in held.items()}
        self._last: dict[str, tuple[Any, torch.Tensor]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def rebound(self, memo: Mapping[int, Any]) -> HeldNumbers:
        """Return the numbers of a deep copy of the module; ``memo`` is that of the copy."""
        other = copy.copy(self)
        other._held = {
            name: (memo.get(id(owner), owner), names, known)
            for name, (owner, names, known) in self._held.items()
        }
        other._others = {
            name: [(memo.get(id(owner), owner), names) for owner, names in places]
            for name, places in self._others.items()
        }
        other._last = {}
        return other

    def get(self, name: str) -> torch.Tensor | None:
        """Return the number of the input ``name`` as a tensor; None if it is not served."""
        owner, names, known = self._held[name]
        value = number_in(owner, names)
        others = (number_in(*place) for place in self._others[name])
        if not all(other is value or same_value(other, value) for other in others):
            return None
        last = self._last.get(name)
        if last is not None and last[0] is value:
            return last[1]
        if not known.holds(value):
            return None
        tensor = as_tensor(value)
        self._last[name] = value, tensor
        return tensor

    def changed(self) -> str | None:
        """Return the label of an attribute whose value is not served; None if all are served."""
        return next((self._labels[name] for name in self._held if self.get(name) is None), None)

    def set_in(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Set the attribute of the input ``name`` in ``module``, a copy of the dispatched one."""
        path, *names = self._keys[name]
        set_number_in(module.get_submodule(path), tuple(names), value.item())

    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Return the dictionaries and keys of the attributes, and of entries inside them."""
        return [
            place for owner, names, _ in self._held.values() for place in dicts_to(owner, names)
        ]
