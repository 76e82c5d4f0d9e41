"""Tensors in containers that one call leaves in an attribute and the next call reads.

An example is the state of an LSTM, ``self.hidden = (h, c)``. Each tensor is an input of the
compiled code, and is looked up in the container at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.contents import DEPTH, is_flat
from tvmbridge.core.types import Key

Steps = tuple[Any, ...]


@dataclass(frozen=True)
class CarriedPlace:
    """The place of a carried tensor.

    - ``key``: the attribute, as (submodule's name, attribute's name).
    - ``steps``: the index or key in the container, and in each container inside it.
    """

    key: Key
    steps: Steps

    @property
    def label(self) -> str:
        """A text for the name of the input."""
        return ".".join((*filter(None, self.key), *map(str, self.steps)))


def places_in(value: Any, steps: Steps = ()) -> Iterator[tuple[Steps, torch.Tensor]]:
    """Yield the tensors in plain tuples, lists and dicts, each with its steps."""
    if isinstance(value, torch.Tensor):
        yield steps, value
    elif len(steps) < DEPTH and type(value) in (dict, list, tuple) and not is_flat(value):
        for step, each in value.items() if type(value) is dict else enumerate(value):
            yield from places_in(each, (*steps, step))


def with_tensors_replaced(
    value: Any, replaced: Callable[[Steps, torch.Tensor], Any], steps: Steps = ()
) -> Any:
    """Return a copy of plain tuples, lists and dicts with other objects in place of tensors."""
    if isinstance(value, torch.Tensor):
        return replaced(steps, value)
    if len(steps) == DEPTH:
        return value
    if type(value) is dict:
        return {k: with_tensors_replaced(v, replaced, (*steps, k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        items = [with_tensors_replaced(v, replaced, (*steps, i)) for i, v in enumerate(value)]
        return type(value)(items)
    return value


class CarriedTensors:
    """Looks up carried tensors by the names of their inputs, as a dict would.

    Args:
        places: for each name, the attributes of the module, the attribute's name, and the steps.
    """

    def __init__(self, places: Mapping[str, tuple[Mapping[str, Any], str, Steps]]) -> None:
        self._places = places

    def get(self, name: str) -> torch.Tensor | None:
        """Return the present tensor of this name; None if there is none."""
        attributes, attribute, steps = self._places[name]
        value = attributes.get(attribute)
        try:
            for step in steps:
                value = value[step]  # type: ignore[index]
        except (IndexError, KeyError, TypeError):
            return None
        return value if isinstance(value, torch.Tensor) else None
