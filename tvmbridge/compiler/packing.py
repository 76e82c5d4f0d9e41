"""Packing: parameters that compiled code reads as one tensor lie side by side in memory.

A product with the concatenated weights of query, key and value needs one tensor. Keeping a copy of
them would make stale results possible: no counter sees a write through ``parameter.data``. So the
parameters themselves move: one *pack* is allocated, the parameters are copied into it, and the
``data`` of each is set to its slice. Compiled code reads the pack, everybody else the parameters,
and both are the same memory: a write of any kind is seen, and there is no second copy.

Each slice has a storage of its own (``torch.frombuffer``), as large as the parameter: saving,
copying, pickling and sharing a parameter are what they were, and files do not grow.

At every call the addresses of the parameters are compared with those of the pack. Where they
differ (``load_state_dict(assign=True)``, ``module.to(...)``, ``parameter.data = ...``) the
parameters are packed again. A parameter is moved only where nobody can notice, see
:func:`~tvmbridge.compiler.pack.unmovable`; where that no longer holds at a call, the values are
concatenated for that call alone, and it is counted.
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

_packing_lock = threading.RLock()


@dataclass(frozen=True)
class PackReport:
    """Parameters that compiled code reads as one tensor.

    ``packed`` says how often they were moved to lie side by side, ``concatenated`` how many calls
    had to concatenate their values instead, by reason.
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
    """What knows addresses of parameters, and lives as long as a call that reads them.

    ``outdated`` keeps memory alive that parameters have been moved from.
    """

    @property
    def outdated(self) -> list[torch.Tensor]:
        """To be added to."""


class ModulePacks:
    """The packs of one module.

    Args:
        module: the module whose parameters may be moved.
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
        """A call begins, forward or backward: memory that it may read is not given back."""
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
        """Why the parameter called ``name`` must not be packed now; None when it may."""
        try:
            parameter = self._module.get_parameter(name)
        except AttributeError:
            return "it is not a parameter"
        reason = unmovable(parameter, self._module)
        return None if reason is None else f"{name} cannot be packed: {reason}"

    def group_refusal(self, names: tuple[str, ...]) -> str | None:
        """Why the parameters called ``names`` cannot be one pack now; None when they can."""
        for group in self._groups:
            if group != names and set(group) & set(names):
                return "a parameter is packed with others"
        return unpackable([self._module.get_parameter(name) for name in names])

    def claim(self, names: tuple[str, ...]) -> None:
        """Note that compiled code reads the parameters called ``names`` as one tensor."""
        self._groups.add(names)

    def claim_like(self, other: ModulePacks) -> None:
        """Take over what ``other`` has noted: compiled code of a copy reads the same."""
        self._groups |= other._groups

    def reports(self) -> tuple[PackReport, ...]:
        """What became of each group so far."""
        return tuple(
            PackReport(
                names,
                self.packed[names],
                {why: n for (group, why), n in self.concatenated.items() if group == names},
            )
            for names in sorted(self._groups)
        )

    def held(self, names: tuple[str, ...], members: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The memory of ``members`` as one tensor, if they lie so."""
        pack = self._packs.get(names)
        return pack.tensor if pack is not None and pack.holds(members) else None

    def tensor(self, names: tuple[str, ...], members: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of ``members``, the parameters called ``names`` of now, as one tensor.

        It is the memory of the parameters where they may be packed, otherwise a copy.
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
        """The values of ``members`` as one tensor of their own."""
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
