"""Entries of a module's dictionaries, with the objects that compiled code expects in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.core.contents import MISSING
from tvmbridge.core.reasons import Kind, Reason

REPLACED = Reason(Kind.REPLACED)
PATCHED = Reason(Kind.PATCHED)


@dataclass(frozen=True)
class DictEntry:
    """An entry of one of a module's dictionaries, and the object expected in it.

    - ``owner``: the module.
    - ``held``: the attribute that is the dictionary, such as ``_buffers``; empty: ``__dict__``.
    - ``key``: the key of the entry.
    - ``expected``: the object that must be in it.
    - ``reason``: why calls are not served if it is not.
    """

    owner: nn.Module
    held: str
    key: str
    expected: Any = None
    reason: Reason = REPLACED


def structure_of(module: nn.Module) -> Iterator[DictEntry]:
    """Yield the entries that fix a module's structure, with their present objects.

    The entries hold submodules, absent parameters and buffers, and for each submodule its
    training flag and its forward.
    """
    for parent in module.modules():
        for name, child in parent._modules.items():
            yield DictEntry(parent, "_modules", name, child, REPLACED)
        for held in ("_parameters", "_buffers"):
            for name, tensor in parent.__dict__[held].items():
                if tensor is None:
                    yield DictEntry(parent, held, name, None, Reason(Kind.ADDED))
        if parent is module:
            continue
        changed = Reason(Kind.CHANGED, "the training flag of a submodule")
        forward = parent.__dict__.get("forward", MISSING)
        # The wrapper that torch.compile returns has the flag of the module that it wraps.
        if "training" in parent.__dict__ or not type(parent).__module__.startswith("torch."):
            yield DictEntry(parent, "", "training", parent.training, changed)
        yield DictEntry(parent, "", "forward", forward, PATCHED)


def entry_of(module: nn.Module, dotted: str) -> DictEntry:
    """Return the entry for the tensor of this dotted name, which need not exist yet."""
    path, _, name = dotted.rpartition(".")
    owner = module.get_submodule(path)
    for held in ("_parameters", "_buffers"):
        if name in owner.__dict__[held]:
            return DictEntry(owner, held, name)
    return DictEntry(owner, "", name)
