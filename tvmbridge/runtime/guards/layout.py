"""The guard of memory layouts: whether code serves a call's strides, and the output strides.

Compiled code takes tensors of any strides, but in eager PyTorch the strides of results follow the
strides of inputs: a convolution of a ``channels_last`` tensor is ``channels_last``. Capture
observed the output strides for the sample. When a call has another layout, forward is observed
again on fake tensors with that layout. A layout that compiled code cannot serve is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.calls.standins import without_inference_tensors
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.assumptions import Question
from tvmbridge.core.number_inputs import marked
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.structure import unflatten
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import InputKind, OutputKind
from tvmbridge.graph_capture.noise import memory_order
from tvmbridge.graph_capture.observe.observation import Observation
from tvmbridge.graph_capture.observe.refusal import first_paragraph
from tvmbridge.graph_capture.observe.staging import staged
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.runtime.guards.state import ModuleState

_SORTS = frozenset({"aten.sort.default", "aten.sort.stable"})
# The most layouts that are observed: an observation takes longer than a call, so calls with ever
# new layouts run the module's own forward.
_MAX_LAYOUTS = 64

_Kind = tuple[tuple[int, int], ...]


class LayoutGuard:
    """Checks the strides of a call's tensors and finds the strides of its outputs.

    It looks at arguments, and at the module's tensors of two or more dimensions.
    """

    def __init__(self, state: ModuleState, compiled: CompiledModule) -> None:
        captured = compiled.captured
        self._state = state
        self._compiled = compiled
        users = [d for d in captured.inputs if d.kind is InputKind.USER]
        held = [d for d in captured.inputs if d.kind.is_of_module]
        # PyTorch draws random numbers in memory order, which follows the inputs' memory order.
        noise = bool(captured.noise)
        self._orders = [(d.position or 0, memory_order(d.spec)) for d in users if noise]
        self._held_orders = [memory_order(d.spec) for d in held] if noise else []
        self._asks = Question.LAYOUT in captured.assumptions.asks
        # Eager PyTorch sorts equal elements in another order if expanded dimensions repeat memory.
        sorts = not _SORTS.isdisjoint([*compiled.native_calls, *compiled.aten_calls])
        self._repeats = [(d.position or 0, _repeated(d.spec.stride)) for d in users if sorts]
        self._positions = [d.position or 0 for d in users]
        self._wide = [i for i, d in enumerate(held) if len(d.spec.shape) > 1]
        self._sample = [(d.position or 0, d.spec.stride) for d in users]
        self._held_sample = [(i, held[i].spec.stride) for i in self._wide]
        self._known: dict[tuple[_Kind, ...], dict[int, tuple[int, ...]] | Reason] = {}

    def mismatch(
        self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> Reason | None:
        """Return why the code cannot serve tensors with these layouts; None if it can."""
        for tensor, order in zip(tensors, self._held_orders, strict=False):
            if tensor is not None and memory_order(tensor) != order:
                return Reason(Kind.HELD_STRIDES)
        if self._lie_as_sample(leaves, tensors):
            return None
        looked_at = self._looked_at(leaves, tensors)
        return self._mismatch_of_others(leaves) or self._unserved(looked_at, leaves)

    def strides(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> Strides:
        """Return the output strides of this call that differ from the sample's, by output number.

        None: no strides differ. :meth:`mismatch` must have accepted the call.
        """
        if not self._known:
            return None
        if self._lie_as_sample(leaves, tensors):
            return None
        strides = self._known[tuple(map(_kind, self._looked_at(leaves, tensors)))]
        assert not isinstance(strides, Reason)
        return strides

    def _lie_as_sample(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> bool:
        # This runs at each call.
        for position, stride in self._sample:
            if leaves[position].stride() != stride:
                return False
        for i, stride in self._held_sample:
            tensor = tensors[i]
            if tensor is not None and tensor.stride() != stride:
                return False
        return True

    def _looked_at(
        self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        found = [leaves[position] for position in self._positions]
        if self._wide:
            found += [tensors[i] for i in self._wide]
        return found

    def _mismatch_of_others(self, leaves: Sequence[Any]) -> Reason | None:
        for position, order in self._orders:
            if memory_order(leaves[position]) != order:
                return Reason(Kind.STRIDES_DRAWS)
        if self._asks:
            return Reason(Kind.STRIDES_ASKED)
        for position, repeated in self._repeats:
            if _repeated(leaves[position].stride()) != repeated:
                return Reason(Kind.EXPANDED)
        return None

    def _unserved(self, looked_at: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Reason | None:
        """Observe the output strides for a new layout of the inputs.

        Return why calls with this layout cannot be served; None if they can.
        """
        kinds = tuple(map(_kind, looked_at))
        known = self._known.get(kinds)
        if known is None:
            with compiling():
                known = self._known.get(kinds)
                if known is None and len(self._known) >= _MAX_LAYOUTS:
                    return Reason(Kind.STRIDES_MANY, str(_MAX_LAYOUTS))
                if known is None:
                    known = self._known[kinds] = self._learned(leaves)
        return known if isinstance(known, Reason) else None

    def _learned(self, leaves: Sequence[Any]) -> dict[int, tuple[int, ...]] | Reason:
        captured = self._compiled.captured
        convention = captured.convention
        arguments = unflatten(marked(leaves, convention.numbers), convention.in_spec)
        try:
            with compiling(), tracing_here(), undisturbed():
                args, kwargs = without_inference_tensors(arguments)
                stage = staged(
                    self._state.module,
                    args,
                    kwargs,
                    self._compiled.recorded,
                    autocast=self._compiled.captured.assumptions.autocast,
                )
        except Exception as error:
            return Reason(Kind.STRIDES_FAIL, first_paragraph(error))
        if stage.observation is None:
            return Reason(Kind.STRIDES_FAIL, first_paragraph(stage.failure))
        return self._compared(stage.observation)

    def _compared(self, seen: Observation) -> dict[int, tuple[int, ...]] | Reason:
        """Return the output strides that differ from the sample's, by output number.

        Return a reason instead if more than strides differs from the capture.
        """
        captured = self._compiled.captured
        users = [o for o in captured.outputs if o.kind is OutputKind.USER]
        aliases = (*seen.sharing.aliases, *(None for _ in captured.convention.bases))
        if (
            tuple(o.alias for o in users) != aliases
            or captured.convention.bases != seen.sharing.bases
        ):
            return Reason(Kind.STRIDES_SHARED)
        if {o.target for o in captured.outputs if o.rebinds} != seen.rebound.keys():
            return Reason(Kind.STRIDES_EXCHANGED)
        strides = iter((*seen.strides, *(None for _ in captured.convention.bases)))
        found: dict[int, tuple[int, ...]] = {}
        number = 0
        for output in captured.outputs:
            stride = seen.rebound.get(output.target or "") if output.rebinds else None
            if output.kind is OutputKind.USER:
                stride = next(strides)
            if not output.is_computed:
                continue
            if stride is not None and output.spec is not None and stride != output.spec.stride:
                found[number] = stride
            number += 1
        return found


def _repeated(stride: Sequence[int]) -> tuple[bool, ...]:
    return tuple(step == 0 for step in stride)


def _kind(tensor: torch.Tensor) -> _Kind:
    """Return the properties of a tensor's strides that result strides may depend on.

    The result has the dimensions in memory order, innermost first, each with a number: its
    elements share memory (0), are contiguous (1) or have gaps (2).
    """
    kinds: list[tuple[int, int]] = []
    reached = 1
    shape, stride = tensor.shape, tensor.stride()
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        if stride[dim] == 0:
            kinds.append((dim, 0))
            continue
        kinds.append((dim, 1 if stride[dim] == reached else 2))
        reached = stride[dim] * max(shape[dim], 1)
    return tuple(kinds)
