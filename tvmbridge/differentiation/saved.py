"""Find which primals and outputs eager PyTorch saves for backward.

Autograd raises an error if a saved tensor is written before backward has read it. So compiled
backward may read the primals and outputs that eager PyTorch saves. It must not read other memory
that the user can write, because no error would report the write.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.reached import reached
from tvmbridge.core.torch_private import pytree, storage_key


@dataclass(frozen=True)
class SavedMemory:
    """Which primals and outputs eager PyTorch saves, and for the backward of which cotangents.

    - ``primals``: for each primal by name, the numbers of the cotangents whose backward reads its
      memory; empty if it is not saved.
    - ``outputs``: the same for each output, by its number.
    - ``copied_primals``: names of primals that compiled backward must read as copies.
    - ``copied_outputs``: numbers of outputs whose memory compiled backward must not read.
    """

    primals: Mapping[str, frozenset[int]]
    outputs: Mapping[int, frozenset[int]]
    copied_primals: frozenset[str]
    copied_outputs: frozenset[int]

    @classmethod
    def of(
        cls, primals: Mapping[str, frozenset[int]], outputs: Mapping[int, frozenset[int]]
    ) -> SavedMemory:
        """Build from the readers of each primal and output; without readers it must be copied."""
        return cls(
            primals,
            outputs,
            frozenset(name for name, readers in primals.items() if not readers),
            frozenset(number for number, readers in outputs.items() if not readers),
        )


def readers_by_storage(outputs: Sequence[torch.Tensor]) -> dict[int, frozenset[int]]:
    """Return, by the key of a storage that autograd saved, which ``outputs``' backward reads it."""
    readers: dict[int, frozenset[int]] = {}
    # The nodes are kept alive, so that no other node gets the same id.
    known: dict[int, tuple[Any, frozenset[int]]] = {}
    for number, output in enumerate(outputs):
        for node in nodes_behind(output.grad_fn):
            if id(node) not in known:
                known[id(node)] = node, frozenset(_storages_of(node))
            for storage in known[id(node)][1]:
                readers[storage] = readers.get(storage, frozenset()) | {number}
    return readers


def nodes_behind(node: Any) -> dict[Any, None]:
    """Return the autograd nodes that a backward from ``node`` may visit, ``node`` included."""
    start = [] if node is None else [node]
    return reached(start, lambda n: [other for other, _ in n.next_functions if other is not None])


def _storages_of(node: Any) -> Iterator[int]:
    kind: Any = type(node)
    for name in _names_of_saved(kind):
        try:
            saved = getattr(node, name)
        except (RuntimeError, AttributeError):  # Written since, or freed: eager raises too.
            continue
        for leaf in pytree.tree_leaves(saved):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                yield storage_key(leaf)


@functools.cache
def _names_of_saved(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes that hold the saved tensors of a class of nodes."""
    return tuple(n for n in dir(kind) if n.startswith("_saved_") or n == "saved_tensors")
