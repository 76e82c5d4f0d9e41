"""Fakes: the fake tensors that replace arguments and module tensors while forward is observed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.bases import overlap
from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.contents import contents
from tvmbridge.core.number_inputs import NumberRange, number_inputs, with_tensors
from tvmbridge.core.torch_private import (
    FakeTensor,
    FakeTensorMode,
    pytree,
    storage_key,
    symbolic_shapes,
)


@dataclass(frozen=True)
class Fakes:
    """The fake tensors that forward runs on.

    - ``mode``: the fake mode that all of them belong to.
    - ``given``: the leaves of forward's arguments, with tensors replaced by fakes.
    - ``structure``: the pytree structure of the arguments.
    - ``held``: the fakes of the module's tensors, by the ids of the real tensors.
    - ``beside``: the real tensors in containers or plain objects among the module's attributes, by
      the ids of their fakes. Such tensors have no name in the module.
    - ``entwined``: the fakes of arguments that share elements with another argument or with a
      tensor of the module.
    - ``numbers``: by the position of a leaf, the values of a number that is an input.
    """

    mode: FakeTensorMode
    given: list[Any]
    structure: pytree.TreeSpec
    held: dict[int, torch.Tensor]
    beside: dict[int, torch.Tensor]
    entwined: list[torch.Tensor]
    numbers: dict[int, NumberRange]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Fakes:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbolic_shapes().ShapeEnv())
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        # Each argument becomes its own graph input, even if one tensor is passed twice or is also
        # a parameter.
        given = [_fake(mode, leaf) for leaf in with_tensors(leaves)]
        own = all_tensors(module)
        held = {id(t): _fake(mode, t) for t in own}
        named = {id(t) for t in tensors_of(module).values()}
        beside = {id(held[id(t)]): t for t in own if id(t) not in named}
        entwined = [given[n] for n in _entwined(leaves, own)]
        return cls(mode, given, structure, held, beside, entwined, number_inputs(leaves))


def laid_out(tensor: torch.Tensor) -> Any:
    """Return the shape and the strides of ``tensor``."""
    return tensor.shape, tensor.stride()


def _entwined(leaves: Sequence[Any], own: Sequence[torch.Tensor]) -> Iterator[int]:
    tensors = [t for t in (*leaves, *own) if isinstance(t, torch.Tensor)]
    storages = [storage_key(t) for t in tensors]
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            mine = storage_key(leaf)
            others = [t for t, s in zip(tensors, storages, strict=True) if s == mine]
            if any(overlap([leaf, other]) for other in others if other is not leaf):
                yield number


def any_tagged(values: Iterable[Any]) -> bool:
    """Whether a fake tensor in ``values`` has attributes that a new fake tensor does not have."""
    plain: dict[int, set[str]] = {}
    for value in values:
        if not isinstance(value, FakeTensor):
            continue
        mode = value.fake_mode
        if id(mode) not in plain:
            plain[id(mode)] = set(vars(mode.from_tensor(torch.empty(0))))
        if not vars(value).keys() <= plain[id(mode)]:
            return True
    return False


def all_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the module's tensors, including tensors in containers and objects that it holds."""
    found = list(tensors_of(module).values())
    for owner in module.modules():
        for name, value in owner.__dict__.items():
            if name not in ("_parameters", "_buffers"):
                found += [t for t in contents(value) if isinstance(t, torch.Tensor)]
    return found


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    # Under no_grad, a view reports ``requires_grad`` of its base, so the fake must have it as well.
    return fake.requires_grad_() if value.requires_grad and not fake.is_inference() else fake
