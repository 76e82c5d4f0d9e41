"""Backward in parts, so that gradients of the last layers are handed out while backward goes on.

Each part is an autograd node. The node of the whole call runs the first part and returns, beside
the gradients, a *link*: an empty gradient for the node of the next part. PyTorch accumulates
gradients before it runs that node, so hooks (those of DistributedDataParallel, for instance) can
send gradients meanwhile::

    outputs -> CompiledFunction  -> link -> LaterPart -> link -> LaterPart
                 |                            |                     |
                 gradients of part 0          of part 1             of part 2
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from tvmbridge.compiler.backward_code import BackwardPart
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.partial_backwards import PartialBackwards
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.called_in_mode import with_autocast_off
from tvmbridge.core.profiling import region
from tvmbridge.core.set_within import set_within
from tvmbridge.core.torch_private import (
    active_data_parallel,
    backward_keeps_graph,
    left_to_python,
)
from tvmbridge.core.types import InputKind
from tvmbridge.core.writes import version_of
from tvmbridge.runtime.primals import packed_into
from tvmbridge.runtime.step import WRITTEN, ConvertedTensors

# The gradients of a whole model are handed out in about this many parts. Each costs a call of
# compiled code, and the exchange that follows the last part overlaps with nothing.
_PARTS = 8

# The bytes of the gradients that a DistributedDataParallel module exchanges.
_exchanged: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

_whole: ContextVar[bool] = ContextVar("whole", default=False)


def whole_backward() -> AbstractContextManager[object]:
    """Let calls within this context run backward whole: one autograd node has all gradients."""
    return set_within(_whole, True)


class GradientParts:
    """Chooses for each call the parts that its backward runs in, and compiles them when needed."""

    def __init__(self, compiled: CompiledModule) -> None:
        assert compiled.split is not None
        split = compiled.split
        self._compiled = compiled
        # None: symbolic code, whose backward is not cut.
        partial = compiled.partial_backwards
        self._partial = partial if isinstance(partial, PartialBackwards) else None
        specs = {
            name: d.spec
            for name, d in zip(split.primals, compiled.captured.primals, strict=False)
            if d.kind is InputKind.PARAMETER
        }
        self._members: dict[BackwardPart, list[int]] = {}
        self._bytes = sum(specs[name].nbytes for name in split.wanted if name in specs)

    def now(self) -> tuple[BackwardPart, ...]:
        """Return the parts for a call made now; none if backward runs whole.

        ``CompileOptions.gradient_parts`` decides, and without it the DistributedDataParallel module
        whose forward is running. Backward is whole under ``no_sync`` and in a group of one process.
        """
        wanted = self._compiled.gradient_parts
        if wanted is not None:
            return () if wanted == 1 else self._of(self._bytes / wanted)
        parallel = active_data_parallel()  # type: ignore[no-untyped-call]
        if parallel is None or not parallel.require_backward_grad_sync:
            return ()
        if parallel.process_group.size() == 1:
            return ()
        part_bytes = max(parallel.bucket_bytes_cap, _bytes_of(parallel) / _PARTS)
        return self._of(part_bytes) if self._bytes >= 2 * part_bytes else ()

    def _of(self, part_bytes: float) -> tuple[BackwardPart, ...]:
        if self._partial is None or not self._bytes or _whole.get():
            return ()
        return self._partial.parts.cut(self._packed, part_bytes)

    @functools.cached_property
    def _packed(self) -> dict[str, list[str]]:
        """The names of the parameters of each packed weight, by the name of its primal."""
        assert self._compiled.split is not None
        primals = self._compiled.split.primals
        first = len(primals) - len(self._compiled.packs)
        return {
            primals[i]: [primals[p] for p in packed_into(self._compiled, {i})]
            for i in range(first, len(primals))
        }

    def members(self, part: BackwardPart) -> list[int]:
        """Return the numbers of the gradients whose parameters ``part`` reads in packed weights."""
        found = self._members.get(part)
        if found is None:
            split = self._compiled.split
            assert split is not None
            read = [split.reads[i] for i in part.reads if i < len(split.reads)]
            names = {name for each in read for name in self._packed.get(each, ())}
            found = [i for i, name in enumerate(split.wanted) if name in names]
            self._members[part] = found
        return found


def _bytes_of(parallel: Any) -> int:
    known = _exchanged.get(parallel)
    if known is None:
        known = sum(p.nbytes for p in parallel.parameters() if p.requires_grad)
        _exchanged[parallel] = known
    return known


class Handed:
    """A backward that has begun: what its parts read, and the values that they carry on.

    Args:
        values: the arguments of compiled backward before the cotangents; empty if ``gradients``
            are given.
        sources: the primals that the gradients are of.
        gradients: all gradients, if they are computed already.
    """

    def __init__(
        self,
        step: Any,
        values: list[Any],
        sources: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self._step = step
        self._values = values
        self._sources = sources
        self._gradients = gradients
        self._keeps = backward_keeps_graph()
        self._carried: list[torch.Tensor | None] = []
        self._read = values[: step.call.place_of_residuals]
        self._versions = [version_of(t) for t in self._read]
        self._member_versions = [version_of(t) for t in sources]

    def first(
        self, cotangents: Sequence[torch.Tensor], held: ConvertedTensors | None
    ) -> Sequence[torch.Tensor | None]:
        """Run the first part; return its gradients."""
        return self._run(self._step.parts[0], cotangents, held)

    def later(self, number: int) -> Sequence[torch.Tensor | None]:
        """Run the part ``number``, after the one before it; return its gradients.

        Raises:
            RuntimeError: a tensor that it reads was written since backward began.
        """
        step = self._step
        part: BackwardPart = step.parts[number]
        if self._gradients is not None:
            gradients: Sequence[Any] = [self._gradients[i] for i in part.gradients]
        else:
            self._refuse_written(part)
            with region(f"{step.call.compiled.origin} backward, part {number}"):
                taken = [self._carried[place] for place in part.takes]
                held = step.unchanged()
                with step.packing(held):
                    gradients = self._run(part, taken, held)
        if number + 1 == len(step.parts) and not self._keeps:
            step.forget()
        return gradients

    def _run(
        self, part: BackwardPart, arguments: Sequence[Any], held: ConvertedTensors | None
    ) -> Sequence[torch.Tensor | None]:
        step, results = self._step, None
        if held is not None and step.lease is not None:
            results = step.lease.backward(arguments, part)
        if results is None:
            values = [*self._values, *arguments]
            bound = None
            if held is not None:
                bound = held.for_partial(part.loaded, len(values), [step.call.place_of_residuals])
            results = part.results(values, bound)
        count = len(part.gradients)
        self._carried += results[count:]
        for place in part.done:
            self._carried[place] = None
        return results[:count]

    def _refuse_written(self, part: BackwardPart) -> None:
        read = [i for i in part.reads if i < len(self._read)]
        written = any(version_of(self._read[i]) != self._versions[i] for i in read)
        for i in self._step.call.gradient_parts.members(part):
            written |= version_of(self._sources[i]) != self._member_versions[i]
        if written:
            raise RuntimeError(WRITTEN)


def link_of(device: torch.device, handed: Handed) -> torch.Tensor:
    """Return the gradient that brings ``handed`` to the node of the next part."""
    link = _empty_link(device)
    link.handed = handed  # type: ignore[attr-defined]
    return link


def _empty_link(device: torch.device) -> torch.Tensor:
    # PyTorch casts a gradient to the dtype of its tensor, and the copy would not have ``handed``.
    # The default dtype may change between forward and backward.
    return torch.empty(0, dtype=torch.float32, device=device)


def linked(
    parts: Sequence[BackwardPart], sources: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """Return a tensor whose autograd nodes run all of ``parts`` but the first; None without any."""
    link: torch.Tensor | None = None
    for number in range(len(parts) - 1, 0, -1):
        of_part = [sources[i] for i in parts[number].gradients]
        link = LaterPart.apply(number, device, link, *of_part)  # type: ignore[no-untyped-call]
    return link


class LaterPart(torch.autograd.Function):
    """The autograd node of one part of backward after the first."""

    @staticmethod
    def forward(
        ctx: Any,
        number: int,
        device: torch.device,
        link: torch.Tensor | None,
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        ctx.number = number
        ctx.is_last = link is None
        ctx.set_materialize_grads(False)
        return _empty_link(device)

    @staticmethod
    @left_to_python
    def backward(ctx: Any, link: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if autocast_now():
            return with_autocast_off(LaterPart.backward, ctx, link)
        handed: Handed = link.handed  # type: ignore[attr-defined]
        gradients = handed.later(ctx.number)
        onward = None if ctx.is_last else link_of(link.device, handed)
        return (None, None, onward, *gradients)
