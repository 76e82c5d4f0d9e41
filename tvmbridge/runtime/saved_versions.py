"""Version checks of saved tensors that only some of the cotangents need.

In backward, autograd checks the versions of all tensors that an autograd function has saved.
Compiled code is one such function. Eager PyTorch has one for each operator and checks only the
operators that a backward reaches. A write into a tensor that this backward does not read must
therefore not raise.
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


@dataclass(frozen=True, eq=False)
class NotedVersion:
    """A saved tensor whose version is checked by tvmbridge and not by autograd.

    - ``tensor``: shares memory and version counter with a tensor that the user holds.
    - ``version``: its version at forward.
    - ``readers``: the numbers of the cotangents whose backward reads it.
    """

    tensor: torch.Tensor
    version: int
    readers: frozenset[int]


class SavedVersions:
    """Finds the saved tensors that not every backward reads, and notes their versions.

    Args:
        overwritten: positions of the primals that are saved as copies, since a call writes them.
    """

    def __init__(
        self, compiled: CompiledModule, reads: Sequence[int], overwritten: Collection[int]
    ) -> None:
        parts = compiled.split
        assert parts is not None
        readers = parts.readers or NOBODY
        everybody = frozenset(range(len(parts.cotangent_of)))
        position = {name: i for i, name in enumerate(parts.primals)}
        kinds = [d.kind for d in compiled.captured.primals]
        some = {position[name]: who for name, who in readers.primals.items() if who != everybody}
        # Buffers are left out: eager batch norm writes its statistics without a new version.
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
        """Return the numbers of the cotangents whose backward reads a primal; None: all."""
        return self._primals.get(position, self._all_guarded.get(position))

    def noted(
        self,
        step: Any,
        places: Sequence[int],
        read: list[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        kept: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the tensors for autograd to save: ``read`` followed by ``kept``.

        A tensor that only some backwards read is noted in ``step``, and autograd gets an alias of
        it that has no version check.

        Args:
            read: the primals that backward reads.
            kept: the outputs that backward reads.
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
