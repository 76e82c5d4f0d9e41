"""Compiled code of a backward function that computes some of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm

from tvmbridge.calls.layouts import Layout
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.executable import Bound, LoadedModule
from tvmbridge.compiler.laying_out import put_on_some
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.compiler.split import SplitModule
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals
from tvmbridge.passes.relax.return_whole import wholes_of


def placed(
    numbers: Sequence[int], gradients: Sequence[torch.Tensor | None], count: int
) -> list[torch.Tensor | None]:
    """Return a list of ``count`` gradients: those with these ``numbers``, and None elsewhere."""
    found: list[torch.Tensor | None] = [None] * count
    for number, gradient in zip(numbers, gradients, strict=True):
        found[number] = gradient
    return found


@dataclass(frozen=True, eq=False)
class PartialBackward:
    """Compiled backward for one set of absent cotangents.

    - ``loaded``: the code.
    - ``gradients``: the numbers of the gradients that it computes.
    - ``copied``: the numbers of results that share memory with another tensor, and are copied.
    - ``layouts``: the layouts of gradients that are not contiguous, by number.
    """

    loaded: LoadedModule
    gradients: tuple[int, ...]
    copied: frozenset[int]
    layouts: Mapping[int, Layout]

    def __call__(
        self, values: Sequence[Any], count: int, bound: Bound | None = None
    ) -> list[torch.Tensor | None]:
        """Return ``count`` gradients; None for each one that this backward does not compute.

        Args:
            values: the values that backward reads, then the cotangents that arrived.
        """
        return self.placed(self.results(values, bound), count)

    def results(self, values: Sequence[Any], bound: Bound | None = None) -> list[torch.Tensor]:
        """Return only the gradients that this backward computes; arguments as in a call."""
        results = self.loaded.run("backward", values, self.copied, bound)
        put_on_some(self.layouts, self.gradients, results)
        return results

    def placed(self, results: Sequence[torch.Tensor], count: int) -> list[torch.Tensor | None]:
        """Return a list of ``count`` gradients with ``results`` in their places, None elsewhere."""
        return placed(self.gradients, results, count)


@dataclass(frozen=True, eq=False)
class BackwardPart(PartialBackward):
    """One of several parts of backward, see :mod:`~tvmbridge.compiler.cut_backward`.

    Each part returns values for later parts after its gradients. Places count these values over
    all parts.

    - ``reads``: the numbers of the primals, among those that backward reads, that it reads.
    - ``takes``: the places of the values that it takes as its last arguments; empty in the first
      part, which takes the cotangents.
    - ``done``: the places of the values that no later part takes.
    """

    reads: tuple[int, ...]
    takes: tuple[int, ...]
    done: tuple[int, ...]


class BackwardLoader:
    """Compiles backward functions of a module, or finds them in the cache, and loads them.

    Args:
        parts: the split module.
        layouts: the layouts of gradients that are not contiguous, by number.
        device: the device of the module's tensors.
        whole: returns the whole backward function; None: ``parts`` has it.

    Attributes:
        keys: the names of the code in the cache.
    """

    def __init__(
        self,
        build: Callable[..., Built],
        parts: SplitModule,
        layouts: Mapping[int, Layout],
        device: torch.device,
        whole: Callable[[], tvm.relax.Function] | None = None,
    ) -> None:
        self.keys: list[str] = []
        self._build = build
        self.parts, self.layouts, self.device = parts, layouts, device
        self.whole = whole or (lambda: parts.mod["backward"])

    def built(self, mod: tvm.IRModule, bundle: BundleResiduals) -> Built:
        """Compile functions of the backward, and note the key of their code."""
        built = self._build(mod, [], bundle)
        if built.key:
            self.keys.append(built.key)
        return built

    def __call__(self, mod: tvm.IRModule) -> tuple[LoadedModule, frozenset[int]]:
        """Return code for a backward function, and the numbers of results that are copied."""
        built = self.built(mod, self.parts.bundle)
        copied = built.shared["backward"]
        pieces = Pieces.of_function(mod["backward"]) if wholes_of(mod["backward"]) else None
        if pieces is not None:
            copied = pieces.places(copied)
        return LoadedModule(built.machine, built.unaligned, self.device, pieces), copied
