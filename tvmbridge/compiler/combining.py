"""Combine matrix products with a common operand into one product, which reads a packed weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import tvm

from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.decisions import Rule, decided
from tvmbridge.core.machine import threads
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import InputKind, PassRecord
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.kernels.parallel import Layers, faster, worthwhile
from tvmbridge.passes.base import free_prefix
from tvmbridge.passes.relax.combine_gradient_matmul import CombineGradientMatmul
from tvmbridge.passes.relax.combine_parallel_batch_matmul import CombineParallelBatchMatmul
from tvmbridge.passes.relax.lift_packed_weights import LiftPackedWeights, concatenated_parameters
from tvmbridge.passes.relax.parallel_products import ParallelProducts
from tvmbridge.pipeline import run_passes, tidy_passes

# For each packed weight that compiled code takes, the dotted names of its parameters.
Packs = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Combining:
    """Combines the products of one graph.

    Args:
        targets: dotted names of the module's parameters by their names in the graph.
        packing: decides which parameters may be packed; None: none may.
    """

    targets: Mapping[str, str]
    packing: ModulePacks | None
    options: CompileOptions
    records: list[PassRecord]

    @classmethod
    def of(
        cls,
        captured: CapturedGraph,
        packing: ModulePacks | None,
        options: CompileOptions,
        records: list[PassRecord],
    ) -> Combining:
        """Return an instance for the graph of ``captured``."""
        targets = {d.name: d.target or "" for d in captured.inputs if d.kind is InputKind.PARAMETER}
        return cls(targets, packing, options, records)

    def inference(self, mod: tvm.IRModule) -> tuple[tvm.IRModule, Packs]:
        """Return ``mod`` with combined products, and the packs: the last parameters of ``main``."""
        if self.options.combine_matmuls == "never" or self.packing is None:
            return mod, ()
        combine = CombineParallelBatchMatmul(
            weight_refusal=self._weight_refusal, group_refusal=self._group_refusal
        )
        mod = run_passes(mod, [combine, *tidy_passes()], self.records)
        return self._lift(mod, "main", None)

    def joint(self, joint: JointModule) -> tuple[JointModule, Packs]:
        """Return ``joint`` with combined products, and the packs, which become its last primals."""
        if self.options.combine_matmuls == "never" or self.packing is None:
            return joint, ()
        combine = CombineParallelBatchMatmul(
            weight_refusal=self._weight_refusal, group_refusal=self._training_refusal
        )
        mod = run_passes(joint.mod, [combine, *tidy_passes()], self.records)
        groups = concatenated_parameters(mod["joint"], set(self.targets))
        if groups:
            backward = CombineGradientMatmul(
                groups,
                input_refusal=partial(self._slower, kind="input"),
                weight_refusal=partial(self._slower, kind="weight"),
            )
            mod = run_passes(mod, [backward, *tidy_passes()], self.records)
        mod, packs = self._lift(mod, "joint", len(joint.primals))
        names = [p.name for p in mod["joint"].params]
        count = len(joint.primals) + len(packs)
        return replace(joint, mod=mod, primals=tuple(names[:count])), packs

    def _lift(
        self, mod: tvm.IRModule, name: str, position: int | None
    ) -> tuple[tvm.IRModule, Packs]:
        groups = tuple(
            names
            for names in concatenated_parameters(mod[name], set(self.targets))
            if all(self._weight_refusal(n) is None for n in names)
            and self._packing().group_refusal(self._targets(names)) is None
        )
        if groups:
            prefix = free_prefix("packed_", [p.name for p in mod[name].params])
            mod = run_passes(mod, [LiftPackedWeights(groups, position, prefix)], self.records)
        return mod, tuple(self._targets(names) for names in groups)

    def _packing(self) -> ModulePacks:
        assert self.packing is not None, "nothing is combined without"
        return self.packing

    def _targets(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.targets[name] for name in names)

    def _weight_refusal(self, name: str) -> str | None:
        if name not in self.targets:
            return "its right operand is no parameter of the module"
        return self._packing().weight_refusal(self.targets[name])

    def _group_refusal(self, group: ParallelProducts) -> str | None:
        if not any(group.names):
            return None  # constants are folded
        if not all(group.names):
            return "parameters and constants are mixed"
        if group.batch or not group.transposed:
            return "its weights would be concatenated at each call, since not by whole rows"
        return self._packing().group_refusal(self._targets(group.names))

    def _training_refusal(self, group: ParallelProducts) -> str | None:
        reason = self._group_refusal(group)
        if reason is not None or self.options.combine_matmuls == "always":
            return reason
        if not self.options.measure_kernels:
            return "not measured, since measure_kernels is off"
        layers = _layers(group)
        if layers is None:
            return f"not measured for {group.dtype}"
        wanted = decided(Rule.MIDDLE, lambda: worthwhile(layers))
        return None if wanted else "not measured to be faster"

    def _slower(self, group: ParallelProducts, kind: str) -> str | None:
        if self.options.combine_matmuls == "always":
            return None
        layers = _layers(group)
        wanted = layers and decided(Rule.MIDDLE, lambda: faster(layers, kind))
        return None if wanted else "not measured to be faster"


def _layers(group: ParallelProducts) -> Layers | None:
    """Return the linear layers to time, combined and apart; None if PyTorch runs none of them."""
    if group.dtype not in ("float32", "float64"):
        return None
    *leading, depth = group.left
    dtype = getattr(torch, group.dtype)
    return Layers(math.prod(leading), depth, group.widths, dtype, threads())
