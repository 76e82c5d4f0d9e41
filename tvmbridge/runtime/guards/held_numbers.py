"""Numbers in attributes that are inputs of compiled code, as tensors of each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tvmbridge.core.contents import MISSING
from tvmbridge.core.number_inputs import NumberRange, as_tensor
from tvmbridge.core.types import Key


class HeldNumbers:
    """Looks up the numbers of a module's attributes, as zero-dimensional tensors.

    A tensor is made anew when the attribute has another object than at the last look.

    Args:
        module: the dispatched module.
        held: by the name of an input, the attribute and the values that the code serves.
    """

    def __init__(self, module: nn.Module, held: Mapping[str, tuple[Key, NumberRange]]) -> None:
        self._held = {
            name: (module.get_submodule(path), attribute, known)
            for name, ((path, attribute), known) in held.items()
        }
        self._keys = {name: key for name, (key, _) in held.items()}
        self._labels = {
            name: "the attribute " + ".".join(filter(None, key)) for name, (key, _) in held.items()
        }
        self.bind(lambda owner: owner.__dict__)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def bind(self, dict_of: Callable[[nn.Module], dict[str, Any]]) -> None:
        """Read the attributes from the dictionaries that ``dict_of`` returns from now on."""
        self._places = {
            name: (dict_of(owner), attribute) for name, (owner, attribute, _) in self._held.items()
        }
        self._last: dict[str, tuple[Any, torch.Tensor]] = {}

    def rebound(self, memo: Mapping[int, Any]) -> HeldNumbers:
        """Return the numbers of a deep copy of the module; ``memo`` is that of the copy."""
        other = copy.copy(self)
        other._held = {
            name: (memo.get(id(owner), owner), attribute, known)
            for name, (owner, attribute, known) in self._held.items()
        }
        other.bind(lambda owner: owner.__dict__)
        return other

    def get(self, name: str) -> torch.Tensor | None:
        """Return the number of the input ``name`` as a tensor; None if it is not served."""
        attributes, attribute = self._places[name]
        value = attributes.get(attribute, MISSING)
        last = self._last.get(name)
        if last is not None and last[0] is value:
            return last[1]
        if not self._held[name][2].holds(value):
            return None
        tensor = as_tensor(value)
        self._last[name] = value, tensor
        return tensor

    def changed(self) -> str | None:
        """Return the label of an attribute whose value is not served; None if all are served."""
        return next((self._labels[name] for name in self._held if self.get(name) is None), None)

    def set_in(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Set the attribute of the input ``name`` in ``module``, a copy of the dispatched one."""
        path, attribute = self._keys[name]
        module.get_submodule(path).__dict__[attribute] = value.item()

    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Return the dictionaries and keys of the attributes."""
        return list(self._places.values())
