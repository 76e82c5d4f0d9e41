"""Places in a module's dictionaries: what compiled code assumes to stand there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.core.contents import MISSING

REPLACED = "a submodule was replaced"
PATCHED = "the forward of a submodule was replaced"


@dataclass(frozen=True)
class DictEntry:
    """An entry of one of a module's dicts, and what must stand there."""

    owner: nn.Module
    held: str  # the name of the dict among the attributes; "" is the dict of attributes itself
    key: str
    expected: Any = None
    reason: str = ""


def structure_of(module: nn.Module) -> Iterator[DictEntry]:
    for parent in module.modules():
        for name, child in parent._modules.items():
            yield DictEntry(parent, "_modules", name, child, REPLACED)
        for held in ("_parameters", "_buffers"):
            for name, tensor in parent.__dict__[held].items():
                if tensor is None:
                    yield DictEntry(parent, held, name, None, "a parameter or buffer was added")
        if parent is module:
            continue
        changed = "the training flag of a submodule changed"
        yield DictEntry(parent, "", "training", parent.training, changed)
        yield DictEntry(parent, "", "forward", parent.__dict__.get("forward", MISSING), PATCHED)


def entry_of(module: nn.Module, dotted: str) -> DictEntry:
    """Where the tensor called ``dotted`` is; it may come to be there later."""
    path, _, name = dotted.rpartition(".")
    owner = module.get_submodule(path)
    for held in ("_parameters", "_buffers"):
        if name in owner.__dict__[held]:
            return DictEntry(owner, held, name)
    return DictEntry(owner, "", name)
