"""Packs: parameters that are moved to be adjacent in one tensor, and rules for which may move."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tvmbridge.backends import BACKENDS
from tvmbridge.core.torch_private import storage_use_count

# Compiled loops need addresses that are multiples of this; other slices would be copied per call.
_ALIGNMENT = 64
_SAME_TYPE = "different shapes or dtypes"


class _Slice(np.ndarray):
    """A numpy array on the memory of one parameter in a pack, which keeps the pack alive."""

    pack: Pack


class Pack:
    """One tensor that holds several parameters, concatenated along their first dimension.

    A pack lives as long as the memory of any of its parameters. A parameter is therefore in the
    pack exactly if its address is within the pack's memory.

    Args:
        members: tensors of one dtype, whose shapes differ at most in the first extent.
    """

    def __init__(self, members: Sequence[torch.Tensor]) -> None:
        first = members[0]
        rows = sum(m.shape[0] for m in members)
        # A tensor created in inference mode could not be trained later.
        with torch.inference_mode(False):
            self.tensor = torch.empty((rows, *first.shape[1:]), dtype=first.dtype)
        begin = self.tensor.data_ptr()
        sizes = [m.numel() * m.element_size() for m in members]
        self.pointers = [begin, *(begin + end for end in accumulate(sizes))][:-1]
        self.end = begin + sum(sizes)
        # For each parameter, the addresses that it was moved from, the latest one first.
        self._origins: list[tuple[int, ...]] = [() for _ in members]
        self._members: list[weakref.ref[torch.Tensor]] = []

    def holds(self, members: Sequence[torch.Tensor]) -> bool:
        """Whether ``members`` are exactly the parameters in the pack, in the same order."""
        if len(members) != len(self.pointers):
            return False
        for member, pointer in zip(members, self.pointers, strict=True):
            if member.data_ptr() != pointer or not member.is_contiguous() or member.is_neg():
                return False
        return True

    def in_use(self) -> bool:
        """Whether all parameters that were moved into the pack are still in its memory."""
        members = [m for m in (reference() for reference in self._members) if m is not None]
        return self.holds(members)

    def moved_from(self, member: torch.Tensor, address: int) -> bool:
        """Whether ``member`` is in the pack, and was at ``address`` before packing moved it."""
        now = member.data_ptr()
        places = zip(self.pointers, self._origins, strict=True)
        return any(now == pointer and address in before for pointer, before in places)

    def overlaps(self, member: torch.Tensor) -> bool:
        """Whether the memory of ``member`` begins in the pack."""
        return self.pointers[0] <= member.data_ptr() < self.end

    def take_in(self, members: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move ``members`` into the pack, and return tensors that keep their old memory alive."""
        memory = self.tensor.view(torch.uint8).reshape(-1).numpy()
        begin = self.pointers[0]
        old = []
        self._origins = [_addresses(m) for m in members]
        with torch.inference_mode(False), torch.no_grad():
            for member, pointer in zip(members, self.pointers, strict=True):
                size = member.numel() * member.element_size()
                part = memory[pointer - begin :][:size].view(_Slice)
                part.pack = self
                moved = torch.frombuffer(part, dtype=member.dtype).view(member.shape)
                moved.copy_(member)
                old.append(member.detach())
                member.data = moved
        self._members = [weakref.ref(m) for m in members]
        _live.add(self)
        return old


_live: weakref.WeakSet[Pack] = weakref.WeakSet()


def _addresses(member: torch.Tensor) -> tuple[int, ...]:
    """Return the address of ``member``, and the addresses that packing has moved it from."""
    now = member.data_ptr()
    packs = list(_live)
    earlier = (p._origins[p.pointers.index(now)] for p in packs if now in p.pointers)
    return (now, *next(earlier, ()))


def is_at(tensor: torch.Tensor, address: int) -> bool:
    """Whether ``tensor`` has the memory that was at ``address``, which packing may have moved.

    Args:
        tensor: any tensor with memory.
        address: the address of its memory at an earlier time.
    """
    if tensor.data_ptr() == address:
        return True
    return any(pack.moved_from(tensor, address) for pack in list(_live))


def pack_of(members: Sequence[torch.Tensor]) -> Pack | None:
    """Return the pack whose parameters are exactly ``members``, in this order; None if none is."""
    return next((pack for pack in list(_live) if pack.holds(members)), None)


def _holders(tensor: torch.Tensor) -> int:
    """Return the number of references to the storage of ``tensor``."""
    return int(storage_use_count(tensor.untyped_storage()._cdata))


# The number of references to the storage of a tensor that nothing else shares.
_ALONE = _holders(torch.empty(1))


def unmovable(parameter: object, module: nn.Module) -> str | None:
    """Return why the memory of ``parameter`` must not move; None if nothing else can refer to it.

    Args:
        module: its other tensors may share the parameter's storage if they do not overlap with it.
    """
    if type(parameter) is not nn.Parameter:
        return "it is not a plain parameter"
    backend = BACKENDS.get(parameter.device.type)
    if parameter.layout is not torch.strided or backend is None or not backend.packs:
        return "it is not a dense tensor on the CPU"
    if not parameter.is_contiguous() or parameter.is_neg() or parameter.is_conj():
        return "its memory is not in its order"
    if parameter.is_inference() or not parameter.is_leaf or parameter.numel() == 0:
        return "it is no leaf with memory of its own"
    if parameter.is_shared():
        return "it is shared with other processes"
    storage = parameter.untyped_storage()
    holders = _holders(parameter) - _ALONE
    # Other references are rare, so the search of all tensors of the module is too.
    if holders:
        mates = {
            id(t): t
            for t in (*module.parameters(), *module.buffers())
            if t.layout is torch.strided and t.untyped_storage()._cdata == storage._cdata
        }
        if holders != len(mates) - 1 or id(parameter) not in mates:
            return "something else holds its memory, a view or a tied parameter"
        if any(_overlap(parameter, t) for t in mates.values() if t is not parameter):
            return "another parameter or buffer shares its memory"
    if not storage.resizable() and not _in_a_pack(parameter) and not _in_a_file(parameter):
        return "its memory was not allocated by PyTorch"
    return None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory of ``other`` may overlap with the contiguous memory of ``one``."""
    if not other.is_contiguous():
        return True
    begin, end = (t.data_ptr() for t in (one, other))
    return begin < end + other.nbytes and end < begin + one.nbytes


def _in_a_pack(tensor: torch.Tensor) -> bool:
    return any(pack.overlaps(tensor) for pack in _live)


def _in_a_file(tensor: torch.Tensor) -> bool:
    """Whether the memory is a private mapping of a file, which is common for loaded weights."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        span, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return access.endswith("p") and inode != "0"
    return False


def unpackable(members: Sequence[torch.Tensor]) -> str | None:
    """Return why tensors that may each be moved cannot form one pack; None if they can."""
    first = members[0]
    if len({id(m) for m in members}) < len(members):
        return "a parameter stands in it twice"
    for member in members:
        if not member.dim() or member.dtype != first.dtype or member.shape[1:] != first.shape[1:]:
            return _SAME_TYPE
        if member is not members[-1] and member.nbytes % _ALIGNMENT:
            return "a parameter would begin at an address that is not aligned"
    for pack in list(_live):
        if any(pack.overlaps(m) for m in members) and pack.in_use() and not pack.holds(members):
            return "a parameter is packed with others"
    return None
