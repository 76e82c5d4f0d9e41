"""Frozen weights: values computed from them once, and a check that nobody changed the weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.compiler.executable import LoadedModule, prepare
from tvmbridge.compiler.freezing import Freezing
from tvmbridge.compiler.pack import is_at
from tvmbridge.core.errors import BuildError
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.kernels.packed import Packed
from tvmbridge.passes.relax.lift_frozen import TRANSFORM


class FrozenWeights:
    """The values that compiled code takes instead of a module's weights (``freeze=True``).

    Args:
        first: the position of the first of these tensors among the primals.

    Raises:
        BuildError: a tensor has no version, so writes into it would not be noticed.
    """

    def __init__(
        self,
        plan: Freezing,
        loaded: LoadedModule,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor | None],
        first: int,
    ) -> None:
        self._plan = plan
        self.slots = [i for i, name in enumerate(names) if name in plan.frozen]
        self._names = [names[i] for i in self.slots]
        found = [tensors[i] for i in self.slots]
        for name, tensor in zip(self._names, found, strict=True):
            if tensor is None or tensor.is_inference():
                raise BuildError(
                    f"freeze=True: writes into {name} cannot be seen, since it was made in "
                    "inference mode, or is yet to be made"
                )
        plain = [t for t in found if t is not None]
        self._tensors = list(map(weakref.ref, plain))
        # Read before the values, so that a write by another thread meanwhile is noticed.
        self._versions = tuple(t._version for t in plain)
        self._pointers = [t.data_ptr() for t in plain]
        self._packed: list[Packed] = []
        self.values = self._made(loaded, tensors, first)
        self._kept = plan.kept

    def _made(
        self, loaded: LoadedModule, tensors: Sequence[torch.Tensor | None], first: int
    ) -> list[torch.Tensor]:
        plan = self._plan
        given: list[Any] = [None] * first + [None if t is None else t.detach() for t in tensors]
        results: list[Any] = []
        if any(v.result is not None for v in plan.values):
            results = loaded.run(TRANSFORM, [given[p] for p in plan.transformed])
        values = []
        for value in plan.values:
            source = given[value.primal] if value.primal is not None else results[value.result or 0]
            if value.packing is None:
                values.append(prepare(source))
            else:
                packed = value.packing.pack(source)
                self._packed.append(packed)
                values.append(prepare(packed.ticket))
        return values

    def changed(self, tensors: Sequence[torch.Tensor | None]) -> Reason | None:
        """Return which of the module's ``tensors`` has changed since freezing, and how; or None."""
        now = [tensors[i] for i in self.slots]
        for name, tensor, known, version, pointer in zip(
            self._names, now, self._tensors, self._versions, self._pointers, strict=True
        ):
            if tensor is None or tensor is not known():
                return Reason(Kind.FROZEN_REPLACED, name)
            if not is_at(tensor, pointer):
                return Reason(Kind.FROZEN_EXCHANGED, name)
            if tensor._version != version:
                return Reason(Kind.FROZEN_WRITTEN, name)
        return None

    def pinned(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Return the frozen tensors among ``tensors``, each with its version when it was frozen."""
        return list(zip([tensors[i] for i in self.slots], self._versions, strict=True))

    def arguments(self, primals: Sequence[Any]) -> list[Any]:
        """Return the arguments of the compiled ``forward`` for these primals."""
        return [*(primals[p] for p in self._kept), *self.values]

    def held(self, held: Mapping[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], int]:
        """Return the arguments of ``forward`` that are the same at each call.

        Returns:
            The arguments by position, and the number of all arguments of ``forward``.
        """
        kept = {i: held[p] for i, p in enumerate(self._kept) if p in held}
        values = dict(enumerate(self.values, start=len(self._kept)))
        return {**kept, **values}, len(self._kept) + len(self.values)
