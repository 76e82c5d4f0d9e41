"""Outputs: builds a call's return value and its writes from the results of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.calls.arguments import Arguments, rebuild
from tvmbridge.calls.views import shares_elements
from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.structure import builder_of
from tvmbridge.core.torch_private import foreach_copy
from tvmbridge.core.types import InputKind, OutputAlias, OutputDescriptor, OutputKind
from tvmbridge.graph_capture.aliasing import made_again
from tvmbridge.runtime.guards.state import ModuleState


class Outputs:
    """Writes mutations back into buffers and arguments, and rebuilds forward's return value."""

    def __init__(self, state: ModuleState, captured: CapturedGraph) -> None:
        self._state = state
        self._captured = captured
        outputs = captured.outputs
        users = [d for d in captured.inputs if d.kind is InputKind.USER]
        self._position_of = {d.name: d.position or 0 for d in users}
        self._number_of = {name: i for i, name in enumerate(state.names)}
        returned = [o for o in outputs if o.kind is OutputKind.USER]
        # Views of other outputs come last, after the outputs that they are views of.
        aliases = [(i, o.alias) for i, o in enumerate(returned) if o.alias is not None]
        self._aliases = sorted(aliases, key=lambda numbered: numbered[1].kind is None)
        views = [alias for _, alias in self._aliases if alias.shape is not None]
        rebound = [(o.target or "", o.alias) for o in outputs if o.rebinds]
        self._rebound_views = [(name, alias) for name, alias in rebound if alias is not None]
        views += [alias for _, alias in self._rebound_views if alias.shape is not None]
        self._views = [alias for alias in views if alias.kind is not None]
        self._written = [o for o in outputs if o.kind is not OutputKind.USER and not o.rebinds]
        convention = captured.convention
        self._num_returned = len(returned)
        self._build = builder_of(convention.out_spec)
        # Whether forward returns only computed values, and leaves nothing else to do.
        self._is_plain = all(o.is_computed for o in returned) and not (
            len(returned) < len(outputs)
            or convention.assigned
            or convention.bases
            or convention.left
            or convention.changed_arguments
            or convention.checks
            or captured.epilogue
            or state.norms
        )
        # Builds the return value from the computed outputs alone; None: more is to be done.
        self.plain = self._build if self._is_plain else None
        # Whether a call writes into buffers or arguments.
        self.writes = len(returned) < len(outputs)

    def mismatch(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> Reason | None:
        """Return why the outputs cannot be rebuilt for this call; None if they can."""
        if self._written and self._overlap(leaves, tensors):
            return Reason(Kind.WRITTEN_SHARED)
        for alias in self._views:
            base = self._base(alias, leaves)
            if base is None or base.stride() != alias.base_stride:
                return Reason(Kind.VIEW_STRIDES)
        return None

    def written_tensors(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that a call writes into."""
        return [self._target(o, leaves, tensors) for o in self._written]

    def _overlap(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> bool:
        """Whether a tensor that is written shares memory, with another tensor or within itself.

        If elements of a tensor share memory, eager PyTorch may write one and skip the other.
        """
        read = [*(leaves[p] for p in self._position_of.values()), *tensors]
        storages = [t.untyped_storage().data_ptr() for t in read if t.numel()]
        targets = self.written_tensors(leaves, tensors)
        if any(map(shares_elements, targets)):
            return True
        written = set(map(id, targets))
        changing = {t.untyped_storage().data_ptr() for t in read if id(t) in written and t.numel()}
        return sum(s in changing for s in storages) > len(changing)

    def _target(
        self, output: OutputDescriptor, leaves: Sequence[Any], tensors: Sequence[Any]
    ) -> torch.Tensor:
        """Return the tensor that this output is written into."""
        if output.kind is OutputKind.INPUT_MUTATION:
            return leaves[self._position_of[output.target or ""]]
        return tensors[self._number_of[output.target or ""]]

    def _base(self, alias: OutputAlias, leaves: Sequence[Any]) -> torch.Tensor | None:
        if alias.kind is InputKind.USER:
            return leaves[int(alias.key)]
        return self._state.tensor(str(alias.key))

    def assemble(
        self,
        results: Sequence[torch.Tensor],
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        """Write mutations back, and rebuild forward's return value from ``results``."""
        if self._is_plain:
            return self._build(list(results[: self._num_returned]))
        captured = self._captured
        computed = iter(results)
        flat: list[Any] = []
        written: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for output in captured.outputs:
            value = next(computed) if output.is_computed else output.value
            if output.kind is OutputKind.USER:
                flat.append(value)
            elif output.rebinds and output.alias is None:
                self._state.rebind(output.target or "", value.detach())
            elif not output.rebinds:
                written.append(self._target(output, leaves, tensors))
                values.append(value)
        if written:
            without_gradients(_write, written, values)
        self._state.assign()
        self._state.norms.renew()
        # After the writes, because views show what was written.
        self._make_again(flat, leaves)
        held = [self._of(alias, flat, leaves) for _, alias in self._rebound_views]
        for (name, _), tensor in zip(self._rebound_views, held, strict=True):
            self._state.rebind(name, tensor)
        flat = self._without_bases(flat)
        if captured.epilogue is not None:
            flat = captured.epilogue.resolve(flat)
        convention = captured.convention
        changed, checks = convention.changed_arguments, convention.checks
        returned = rebuild(flat, convention.out_spec, changed, arguments, checks)
        if convention.left:
            returned, left = returned
            self._state.leave(left)
        return returned

    def before_epilogue(self, results: Sequence[torch.Tensor], leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs of the epilogue from the computed ``results``; nothing is written."""
        computed = iter(results)
        outputs = self._captured.outputs
        values = [(o.kind, next(computed) if o.is_computed else o.value) for o in outputs]
        flat = [value for kind, value in values if kind is OutputKind.USER]
        self._make_again(flat, leaves)
        return self._without_bases(flat)

    def _make_again(self, flat: list[Any], leaves: Sequence[Any]) -> None:
        for number, alias in self._aliases:
            flat[number] = self._of(alias, flat, leaves)

    def _of(self, alias: OutputAlias, flat: Sequence[Any], leaves: Sequence[Any]) -> torch.Tensor:
        base = flat[int(alias.key)] if alias.kind is None else self._base(alias, leaves)
        assert base is not None
        return made_again(alias, base)

    def _without_bases(self, flat: Sequence[Any]) -> list[Any]:
        return list(flat[: len(flat) - len(self._captured.convention.bases)])


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy ``values`` into ``targets``, by one call for all tensors of a dtype.

    PyTorch would copy tensors of several dtypes one by one.
    """
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(targets, values, strict=True):
        to, source = groups.setdefault(target.dtype, ([], []))
        to.append(target)
        source.append(value)
    for to, source in groups.values():
        foreach_copy(to, source)
