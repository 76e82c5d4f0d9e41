"""Versions of what the user holds and backward reads, asked for by some of the cotangents alone.

Autograd asks for the versions of all that an autograd function has saved. Compiled code is one such
function, where eager PyTorch has one for each operator and visits those that a backward needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.readers import NOBODY
from tvmbridge.core.types import InputKind
from tvmbridge.core.writes import version_of
from tvmbridge.runtime.primals import primals_of


@dataclass(frozen=True, eq=False)
class NotedVersion:
    """A tensor with the memory and the version counter of one that the user holds.

    ``version``: what it was at forward. ``readers``: numbers of the cotangents that it matters to.
    """

    tensor: torch.Tensor
    version: int
    readers: frozenset[int]


class SavedVersions:
    """Which tensors autograd must not ask for the versions of, since not every backward reads them.

    Args:
        compiled: a module compiled with gradients.
        reads: positions of the primals that backward reads.
        overwritten: positions of the primals that are copied, since a call writes them.
    """

    def __init__(
        self, compiled: CompiledModule, reads: Sequence[int], overwritten: Collection[int]
    ) -> None:
        parts = compiled.split
        assert parts is not None
        readers = parts.readers or NOBODY
        everybody = frozenset(range(len(parts.cotangent_of)))
        position = {name: i for i, name in enumerate(parts.primals)}
        kinds = [d.kind for d in primals_of(compiled)]
        some = {position[name]: who for name, who in readers.primals.items() if who != everybody}
        # A call may write buffers without a new version in eager PyTorch, as batch norm does.
        guarded = {
            position[name]: who
            for name, who in readers.guarded_primals.items()
            if kinds[position[name]] is not InputKind.BUFFER and position[name] not in overwritten
        }
        self.parameters = [i for i in guarded if kinds[i] is InputKind.PARAMETER]
        self._all_guarded = guarded
        self._guarded = {i: w for i, w in guarded.items() if i not in self.parameters}
        self._primals = {i: who for i, who in some.items() if i not in overwritten}
        self._outputs = {n: who for n, who in readers.outputs.items() if who != everybody}
        self._guarded_outputs = readers.guarded_outputs
        self._kept = [number for number, _ in parts.kept_outputs]
        self._any = bool(
            self._primals or self._outputs or self._all_guarded or self._guarded_outputs
        )

    def readers_of_primal(self, position: int) -> frozenset[int] | None:
        """The cotangents that read a primal; None: all of them."""
        return self._primals.get(position, self._all_guarded.get(position))

    def noted(
        self,
        step: Any,
        places: Sequence[int],
        read: list[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        kept: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """What autograd saves: ``read``, the primals at ``places``, and ``kept`` of the outputs.

        The step notes the versions of those that only some backwards read, and autograd gets the
        same memory without a version.
        """
        if not self._any:
            return [*read, *kept]
        guarded = self._all_guarded if step.held is None else self._guarded
        step.noted = [
            *(_note(step.primals[i], who) for i, who in guarded.items()),
            *(_note(outputs[n], who) for n, who in self._guarded_outputs.items()),
        ]
        saved = []
        who_reads = [self._primals.get(i) for i in places]
        who_reads += [self._outputs.get(number) for number in self._kept]
        for tensor, who in zip([*read, *kept], who_reads, strict=True):
            if who is not None:
                step.noted.append(_note(tensor, who))
            saved.append(tensor if who is None else tensor.data)
        return saved


def _note(tensor: torch.Tensor, readers: frozenset[int]) -> NotedVersion:
    return NotedVersion(tensor.detach(), version_of(tensor), readers)
