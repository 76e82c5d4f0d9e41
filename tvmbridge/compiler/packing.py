"""Packing: parameters that compiled code reads as one tensor are moved to be adjacent in memory.

A product with the concatenated weights of query, key and value needs one tensor. A copy of the
weights could become stale: no version counter sees a write through ``parameter.data``. Therefore
the parameters themselves move. One *pack* is allocated, the parameters are copied into it, and the
``data`` of each parameter is set to its slice. Compiled code reads the pack, and all other code
reads the parameters. Both are the same memory, so every write is seen and there is no second copy.

Each slice has its own storage (``torch.frombuffer``), as large as the parameter. Saving, copying,
pickling and sharing a parameter therefore work as before, and files do not grow.

Each call compares the addresses of the parameters with the addresses in the pack. If they differ
(after ``load_state_dict(assign=True)``, ``module.to(...)``, ``parameter.data = ...``), the
parameters are packed again. A parameter is moved only if nothing else can refer to its memory, see
:func:`~tvmbridge.compiler.pack.unmovable`. If that no longer holds, a call concatenates the values
for itself alone, and the report counts it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from tvmbridge.compiler.pack import Pack, pack_of, unmovable, unpackable
from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.locks import Lock

_packing_lock = Lock(reentrant=True)


@dataclass(frozen=True)
class PackReport:
    """A report on parameters that compiled code reads as one tensor.

    - ``names``: the dotted names of the parameters.
    - ``packed``: how often the parameters were moved to be adjacent.
    - ``concatenated``: how many calls had to concatenate the values instead, by reason.
    """

    names: tuple[str, ...]
    packed: int
    concatenated: Mapping[str, int]

    def __str__(self) -> str:
        line = f"packed {self.packed} times: {', '.join(self.names)}"
        for reason, calls in self.concatenated.items():
            line += f"; concatenated in {calls} calls, because {reason}"
        return line


class AddressReader(Protocol):
    """An object that stores addresses of parameters, and lives until the calls that use them end.

    - ``outdated``: tensors on old memory of parameters, which a running call may still read.
    """

    @property
    def outdated(self) -> list[torch.Tensor]:
        """The list of these tensors, to which packing appends."""


class ModulePacks:
    """Moves parameters of one module so that compiled code reads several as one tensor.

    A *pack* is the memory of parameters that are adjacent, such as the weights of query, key and
    value.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._packs: weakref.WeakValueDictionary[tuple[str, ...], Pack]
        self._packs = weakref.WeakValueDictionary()
        self._groups: set[tuple[str, ...]] = set()
        self._inside: Counter[int] = Counter()
        self._old: list[torch.Tensor] = []
        self.readers: weakref.WeakSet[AddressReader] = weakref.WeakSet()
        self.packed: Counter[tuple[str, ...]] = Counter()
        self.concatenated: Counter[tuple[tuple[str, ...], str]] = Counter()

    def __enter__(self) -> None:
        """Begin a call, forward or backward; memory that it may read is kept until it ends."""
        ident = threading.get_ident()
        self._inside[ident] += 1
        if self._old and self._alone():
            self._old = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ident = threading.get_ident()
        self._inside[ident] -= 1
        if not self._inside[ident]:
            del self._inside[ident]

    def _alone(self) -> bool:
        return len(self._inside) <= 1

    def weight_refusal(self, name: str) -> str | None:
        """Return why the parameter ``name`` must not be packed now; None if it may."""
        try:
            parameter = self._module.get_parameter(name)
        except AttributeError:
            return "it is not a parameter"
        reason = unmovable(parameter, self._module)
        return None if reason is None else f"{name} cannot be packed: {reason}"

    def group_refusal(self, names: tuple[str, ...]) -> str | None:
        """Return why the parameters ``names`` cannot form one pack now; None if they can."""
        for group in self._groups:
            if group != names and set(group) & set(names):
                return "a parameter is packed with others"
        return unpackable([self._module.get_parameter(name) for name in names])

    def claim(self, names: tuple[str, ...]) -> None:
        """Record that compiled code reads the parameters ``names`` as one tensor."""
        self._groups.add(names)

    def claim_like(self, other: ModulePacks) -> None:
        """Add the groups of ``other``, the packs of a copy of the module with the same code."""
        self._groups |= other._groups

    def reports(self) -> tuple[PackReport, ...]:
        """Return a report on each group of parameters."""
        return tuple(
            PackReport(
                names,
                self.packed[names],
                {why: n for (group, why), n in self.concatenated.items() if group == names},
            )
            for names in sorted(self._groups)
        )

    def held(self, names: tuple[str, ...], members: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the pack's tensor if ``members`` are in the pack; otherwise None."""
        pack = self._packs.get(names)
        return pack.tensor if pack is not None and pack.holds(members) else None

    def tensor(self, names: tuple[str, ...], members: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of ``members`` as one tensor; pack them now if that is possible.

        Returns:
            A tensor on the memory of the parameters or, if they cannot be packed, a copy.
        """
        held = self.held(names, members)
        if held is not None:
            return held
        with _packing_lock:
            pack = pack_of(members)
            reason = None if pack is not None else self._reason(members)
            if pack is None and reason is None:
                pack = self._pack(names, members)
            if pack is not None:
                self._packs[names] = pack
                return pack.tensor
        self.concatenated[names, reason or ""] += 1
        return self.copied(members)

    @staticmethod
    def copied(members: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of the values of ``members`` as one tensor."""
        return without_gradients(torch.cat, [m.detach() for m in members])

    def _reason(self, members: Sequence[torch.Tensor]) -> str | None:
        for member in members:
            reason = unmovable(member, self._module)
            if reason is not None:
                return reason
        return unpackable(members)

    def _pack(self, names: tuple[str, ...], members: Sequence[torch.Tensor]) -> Pack:
        pack = Pack(members)
        old = pack.take_in(members)
        self.packed[names] += 1
        if not self._alone():
            # Another thread may be reading it.
            self._old += old
        for reader in list(self.readers):
            reader.outdated.extend(old)
        return pack
