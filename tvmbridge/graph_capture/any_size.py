"""Trace a module with symbolic sizes, and derive its programs at concrete sizes from the trace."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.layouts import dense_strides
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.decisions import Decision
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import make_contiguous_strides_for, pytree
from tvmbridge.graph_capture.capture import export_with_symbols
from tvmbridge.graph_capture.noise import find_noise
from tvmbridge.graph_capture.observe.descriptors import (
    describe_inputs,
    describe_outputs,
    with_aliases,
)
from tvmbridge.graph_capture.observe.refusal import first_paragraph
from tvmbridge.graph_capture.observe.staging import StagedModule, staged
from tvmbridge.graph_capture.open_masks import OpenMask
from tvmbridge.graph_capture.relations import Relations, relations_in
from tvmbridge.graph_capture.resized import NumbersAt, OtherProgramError, outputs_at, resized

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SymbolicTrace:
    """A module traced with symbols in place of some sizes.

    - ``stage``: the stand-in that was traced, with its observation
    - ``program``: the exported program with symbolic sizes
    - ``relations``: the conditions on sizes under which the program is valid
    - ``sizes``: the shapes of the sample's tensors, by the number of the leaf
    - ``needs_grad``: whether the graph will be differentiated
    - ``masks``: the constant masks that ``program`` has no more
    - ``decisions``: what was decided by the sizes of the sample, such as which masks these are
    """

    stage: StagedModule
    program: ExportedProgram
    relations: Relations
    sizes: Mapping[int, Sequence[int]]
    needs_grad: bool
    masks: tuple[OpenMask, ...] = ()
    decisions: Sequence[Decision] = ()

    def stage_at(self, arguments: Arguments) -> StagedModule | None:
        """Return the traced module with what its run would show for ``arguments``.

        Return None if this does not follow from the trace: forward assigns attributes or rebinds
        buffers, results are views, or the trace has other strides for results than eager PyTorch.
        """
        seen = self.stage.observation
        if seen is None or not self._shows_all:
            return None
        strides = self._strides_at(shapes_of(arguments))
        return replace(self.stage, observation=replace(seen, strides=strides))

    @functools.cached_property
    def has_dense_results(self) -> bool:
        """Whether :meth:`stage_at` is known, with contiguous results."""
        results = outputs_at(self.program, self.relations.symbols(self.sizes))
        return self._shows_all and all(
            result is None or dense_strides(result) == make_contiguous_strides_for(result.shape)
            for result in results
        )

    @functools.cached_property
    def _shows_all(self) -> bool:
        """Whether the run of the module shows nothing that depends on sizes, except for strides."""
        seen = self.stage.observation
        if seen is None or seen.assigned or seen.rebound:
            return False
        if seen.sharing.bases or seen.sharing.exchanged:
            return False
        aliases = filter(None, seen.sharing.aliases)
        if any(alias.shape is not None or alias.steps for alias in aliases):
            return False
        return self._strides_at(self.sizes) == seen.strides

    def _strides_at(self, sizes: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...] | None, ...]:
        """Return the dense strides that results have in the trace at these sizes."""
        return tuple(
            None if each is None else dense_strides(each)
            for each in outputs_at(self.program, self.relations.symbols(sizes))
        )

    def captured(
        self, like: CapturedGraph, there: Arguments, arguments: Arguments
    ) -> CapturedGraph | None:
        """Derive the graph for ``arguments`` from the graph ``like``, captured for ``there``.

        Return None if the symbolic trace cannot give it, so that ``arguments`` need a capture of
        their own.
        """
        stage = self.stage_at(arguments)
        if stage is None or like.prologue is not None or like.epilogue is not None:
            return None
        assert stage.observation is not None
        symbols = [self.relations.symbols(shapes_of(each)) for each in (there, arguments)]
        try:
            program = resized(like.program, self.program, *symbols)
            if not all(mask.holds(NumbersAt(symbols[1]).of) for mask in self.masks):
                raise OtherProgramError("a mask is causal, or open, at some sizes alone")
        except OtherProgramError as error:
            logger.debug("each size is traced: %s", error)
            return None
        leaves = pytree.tree_leaves(arguments)
        return replace(
            like,
            program=program,
            inputs=describe_inputs(self.stage.module, program, leaves, self.needs_grad)[0],
            outputs=with_aliases(describe_outputs(program, like.device), stage.observation),
            noise=find_noise(program.graph),
        )


def shapes_of(arguments: Arguments) -> dict[int, Sequence[int]]:
    """Return the shapes of the tensors among ``arguments``, by the number of the leaf."""
    leaves = pytree.tree_leaves(arguments)
    return {i: t.shape for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}


def traced_with_symbols(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dimensions: Sequence[tuple[int, int]],
    *,
    needs_grad: bool,
    apart: bool = True,
    autocast: Autocast = (),
) -> SymbolicTrace:
    """Trace ``module`` with symbols for some sizes of its arguments.

    Args:
        dimensions: the symbolic sizes, each as (number of the leaf, dimension).
        apart: trace a copy of the module; False: trace the module itself.

    Raises:
        CaptureError: torch.export cannot trace the module with these symbols.
    """
    symbolic: dict[int, dict[int, Any]] = {}
    for leaf, number in dimensions:
        symbolic.setdefault(leaf, {})[number] = torch.export.Dim.AUTO
    stage = staged(module, args, kwargs, needs_grad, apart=apart, autocast=autocast)
    try:
        program, masks = export_with_symbols(stage, args, kwargs, needs_grad, symbolic)
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot trace {type(module).__name__} with symbolic sizes: "
            f"{first_paragraph(error)}"
        ) from error
    sizes = shapes_of((args, dict(kwargs)))
    return SymbolicTrace(stage, program, relations_in(program), sizes, needs_grad, masks)
