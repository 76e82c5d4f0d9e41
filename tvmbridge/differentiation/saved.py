"""What of the user's memory eager PyTorch saves for backward: primals, and outputs.

Autograd raises where a saved tensor is written before backward has read it. Compiled code may read
in backward what eager PyTorch saves, and nothing else that the user can write.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree, storage_key


@dataclass(frozen=True)
class SavedMemory:
    """Which cotangents' backward reads the memory of a primal or an output in eager PyTorch.

    ``primals``: by name, the numbers of the cotangents; of none where it is not saved.
    ``outputs``: the same, by the number of the output.
    ``copied_primals``: names of primals that compiled backward must read as copies.
    ``copied_outputs``: numbers of outputs whose memory compiled backward must not read.
    """

    primals: Mapping[str, frozenset[int]]
    outputs: Mapping[int, frozenset[int]]
    copied_primals: frozenset[str]
    copied_outputs: frozenset[int]

    @classmethod
    def of(
        cls, primals: Mapping[str, frozenset[int]], outputs: Mapping[int, frozenset[int]]
    ) -> SavedMemory:
        """What is saved for no cotangent is copied."""
        return cls(
            primals,
            outputs,
            frozenset(name for name, readers in primals.items() if not readers),
            frozenset(number for number, readers in outputs.items() if not readers),
        )


def readers_by_storage(outputs: Sequence[torch.Tensor]) -> dict[int, frozenset[int]]:
    """For each storage that autograd has saved, the numbers of the ``outputs`` that read it."""
    readers: dict[int, frozenset[int]] = {}
    # Nodes are kept alive, so that no other node has the same id.
    known: dict[int, tuple[Any, frozenset[int]]] = {}
    for number, output in enumerate(outputs):
        for node in _nodes_of(output):
            if id(node) not in known:
                known[id(node)] = node, frozenset(_storages_of(node))
            for storage in known[id(node)][1]:
                readers[storage] = readers.get(storage, frozenset()) | {number}
    return readers


def _nodes_of(output: torch.Tensor) -> Iterator[Any]:
    """The autograd nodes that a backward from ``output`` visits."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _storages_of(node: Any) -> Iterator[int]:
    kind: Any = type(node)
    for name in _names_of_saved(kind):
        try:
            saved = getattr(node, name)
        except (RuntimeError, AttributeError):  # Written since, or freed: eager raises as well.
            continue
        for leaf in pytree.tree_leaves(saved):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                yield storage_key(leaf)


@functools.cache
def _names_of_saved(kind: Any) -> tuple[str, ...]:
    """The attributes in which nodes of a class have what they save."""
    return tuple(n for n in dir(kind) if n.startswith("_saved_") or n == "saved_tensors")
