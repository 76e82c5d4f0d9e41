"""Carrying: choose the tensors in containers of attributes that become inputs of the graph.

Before::

    h, c = self.hidden;  self.hidden = cell(x, h, c)   # the tensors are others at each call

After (the stand-in)::

    h, c = self.outside_hidden_0, self.outside_hidden_1;  left: self.hidden
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.plain import has_plain_memory
from tvmbridge.core.carried import CarriedPlace, Steps, places_in, with_tensors_replaced
from tvmbridge.core.contents import ANY_TENSOR
from tvmbridge.core.types import Key
from tvmbridge.graph_capture.observe.adoption import Adoption
from tvmbridge.graph_capture.observe.observation import Observation
from tvmbridge.graph_capture.trace.adopted import adopt


def carry(
    actor: nn.Module, module: nn.Module, seen: Observation, adoption: Adoption
) -> dict[str, CarriedPlace]:
    """Register in ``actor`` the tensors in containers that forward reads and sets at each call.

    Args:
        actor: the stand-in, after a first call; its containers get new tensors.
        module: the user's module, whose tensors say which of them require a gradient.
        seen: an observation of ``actor`` after that call.
        adoption: loses the tensors that were found in the containers.

    Returns:
        The places of the tensors, by the names of their inputs.
    """
    carried: dict[str, CarriedPlace] = {}
    for key in [k for k, way in seen.left.items() if way.into == "place" and k in seen.values]:
        attributes = actor.get_submodule(key[0]).__dict__
        held = attributes.get(key[1])
        tensors = [tensor for _, tensor in places_in(held)]
        if isinstance(held, torch.Tensor) or not tensors or not all(map(has_plain_memory, tensors)):
            continue
        flags = dict(places_in(module.get_submodule(key[0]).__dict__.get(key[1])))
        for tensor in (*tensors, *flags.values()):
            adoption.found.pop(id(tensor), None)
        found: dict[Steps, torch.Tensor] = {}

        def renewed(
            steps: Steps,
            tensor: torch.Tensor,
            flags: Mapping[Steps, torch.Tensor] = flags,
            found: dict[Steps, torch.Tensor] = found,
        ) -> torch.Tensor:
            # Each place has a tensor of its own, whatever memory the tensors of this call share.
            found[steps] = tensor.detach().clone()
            if steps in flags and flags[steps].requires_grad:
                found[steps] = nn.Parameter(found[steps])
            return found[steps]

        attributes[key[1]] = with_tensors_replaced(held, renewed)
        places = [CarriedPlace(key, steps) for steps in found]
        names = adopt(actor, [(p.label, found[p.steps]) for p in places])
        carried.update(zip(names, places, strict=True))
    return carried


def with_any_tensor(
    values: Mapping[Key, Any], carried: Mapping[str, CarriedPlace]
) -> dict[Key, Any]:
    """Return ``values`` that accept any tensor in the places of ``carried``."""
    keys = {place.key for place in carried.values()} & values.keys()
    anything = {key: with_tensors_replaced(values[key], _any_tensor) for key in keys}
    return {**values, **anything}


def _any_tensor(_: Steps, __: torch.Tensor) -> Any:
    return ANY_TENSOR
