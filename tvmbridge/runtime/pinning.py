"""Builds fast paths: a generated guard, and everything prepared for the calls it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.compiler.executable import Bound
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.fast_path import Direct, FastPath, direct_call
from tvmbridge.runtime.graphed import GraphedCode
from tvmbridge.runtime.guards.fast import FastGuard
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.watch import MovingTensors


def renewed_path(
    entry: CompiledEntry, signature: Signature, leaves: Sequence[Any]
) -> FastPath[CompiledEntry] | None:
    """Build a fast path for calls like this one, which the full guards have accepted.

    If the path accepts no calls, a new one is built after 1, 2, 4, 8 ... slow calls, so that
    building costs little. If the module's tensors have moved meanwhile, the new one is not bound to
    their addresses. None: no fast path is possible, or it is not time for one.
    """
    entry.slow_calls += 1
    due = not entry.slow_calls & (entry.slow_calls - 1)
    tensors = entry.state.tensors()
    if not entry.may_be_fast or not due or any(t is None for t in tensors):
        return None
    held = [t for t in tensors if t is not None]
    before, entry.addresses = entry.addresses, [t.data_ptr() for t in held]
    moving, fast = entry.moving, None
    moves = entry.slow_calls > 1 if moving is None else not moving.end_rest()
    if moves and before != entry.addresses:
        fast = _moving_path(entry, signature, leaves, held)
    fast = fast or _pinned_path(entry, signature, leaves, held)
    # Another thread may have changed the module since the full guards accepted the call.
    if any(a is not b for a, b in zip(tensors, entry.state.tensors(), strict=True)):
        return None
    return fast if entry.mismatch(leaves, tensors) is None else None


def _moving_path(
    entry: CompiledEntry,
    signature: Signature,
    leaves: Sequence[Any],
    tensors: Sequence[torch.Tensor],
) -> FastPath[CompiledEntry] | None:
    """Build a fast path that is not bound to the addresses of ``tensors``.

    Each call converts them. None: the code packs or writes them, or has frozen them.
    """
    writes = entry.outputs.written_tensors(leaves, tensors)
    if entry.packs or entry.frozen is not None or writes:
        return None
    moving = entry.moving = MovingTensors(tensors, entry.moving)
    guard = FastGuard(entry.state, signature, leaves, moving, writes, entry.records_writes)
    return FastPath(entry, guard, list(tensors), entry.layouts.strides(leaves, tensors))


def _pinned_path(
    entry: CompiledEntry,
    signature: Signature,
    leaves: Sequence[Any],
    tensors: Sequence[torch.Tensor],
) -> FastPath[CompiledEntry] | None:
    """Build a fast path for ``leaves`` and the module's ``tensors``; None if there is none."""
    written = entry.outputs.written_tensors(leaves, tensors)
    frozen = entry.frozen
    guard = FastGuard(
        entry.state,
        signature,
        leaves,
        tensors,
        written,
        entry.records_writes,
        [] if frozen is None else frozen.pinned(tensors),
    )
    first = len(entry.given.inputs)
    held = dict(enumerate(tensors, start=first))
    packed = first + len(tensors) + len(entry.given.noise)
    for i, (names, slots) in enumerate(entry.packs, start=packed):
        pack = entry.packing.held(names, [tensors[s] for s in slots])
        if pack is None:
            return None
        held[i] = pack
    strides = entry.layouts.strides(leaves, tensors)
    given = [leaves[p] for p in entry.given.inputs]
    as_they_are = entry.compiled.loaded.readable("forward", given)
    code = _code_to_graph(entry, tensors, strides)
    if entry.training is not None:
        held_for = entry.training.hold(held, as_they_are)
        pinned = entry.second_order.pin(tensors)
        fast = FastPath(entry, guard, list(tensors), strides, held=held_for, pinned=pinned)
        entry.packing.readers.add(held_for)
        if code is not None:
            fast.graphs = code.training(entry.training, held_for)
    else:
        count = packed + len(entry.packs)
        if frozen is not None:
            held, count = frozen.held(held)
        bound = entry.compiled.loaded.bind("forward", held, count, as_they_are)
        fast = FastPath(entry, guard, list(tensors), strides, bound=bound)
        if code is not None:
            fast.graphs = code.inference(bound)
        elif entry.given.plain and not strides:
            fast.direct = _direct(entry, bound, len(leaves))
    entry.packing.readers.add(fast)
    return fast


def _direct(entry: CompiledEntry, bound: Bound, leaves: int) -> Direct | None:
    """Return a function that only runs the code; None if the entry needs more around the code."""
    compiled, build = entry.compiled, entry.outputs.plain
    layouts = compiled.layouts
    if entry.autocast or compiled.copied_outputs or layouts.outputs or layouts.padded:
        return None
    if build is None:
        return None
    if entry.frozen is not None:
        return None
    inputs = entry.given.inputs
    return direct_call(entry, entry.counting, compiled.loaded, bound, leaves, inputs, build)


def _code_to_graph(
    entry: CompiledEntry, tensors: Sequence[torch.Tensor], strides: Strides
) -> GraphedCode | None:
    """Return the code prepared for CUDA graphs; None if a call does more than launch kernels.

    Tensors that have moved from call to call get no graphs: a capture empties the allocator's
    cache, so that the tensors of other blocks that FSDP gathers would move, and lose their graphs.
    """
    if entry.given.converts or entry.moving is not None or not entry.compiled.cuda_graphs:
        return None
    counts = entry.graph_replays, entry.graph_skips
    return GraphedCode(entry.compiled, tensors, strides, entry.given.of_inputs, *counts)
