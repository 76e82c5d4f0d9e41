"""Backward where some cotangents did not arrive: what eager PyTorch does not visit adds nothing.

The compiled backward takes a cotangent for every output. Zeros in place of one that did not arrive
give eager's gradients as long as all derivatives on its paths are finite; where one is not, zero
times infinity is NaN. Then, and where a backward of the user's own may be anything but linear, a
backward without the absent cotangents is compiled and used from then on. To look at all gradients
costs more than a pass over their memory, so what is absent again and again gets one too.
"""

from __future__ import annotations

import cmath
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm

from tvmbridge.compiler.build import Built
from tvmbridge.compiler.executable import Bound, LoadedModule
from tvmbridge.compiler.split import SplitModule, build_function
from tvmbridge.core.errors import LEAVE_TO_EAGER, BridgeError
from tvmbridge.core.torch_private import has_storage
from tvmbridge.core.turns import compiling
from tvmbridge.differentiation.custom_functions import called
from tvmbridge.graph_capture.memory.layouts import Layout
from tvmbridge.passes.base import flat_results
from tvmbridge.passes.relax.drop_cotangents import DropCotangents
from tvmbridge.passes.relax.remove_borders import RemoveBorders
from tvmbridge.passes.relax.zero_zapp import ZeroZapp
from tvmbridge.pipeline import AnyPass, run_passes, tidy_passes

logger = logging.getLogger(__name__)

_NO_BATCHES = (
    "tvmbridge does not support gradients of a batch of cotangents (is_grads_batched, "
    f"vectorize=True): {LEAVE_TO_EAGER}"
)
_FOR_ANY_SIZE = (
    "backward without a gradient for some outputs meets infinite derivatives, for which code is "
    "compiled that symbolic code has none of: use all outputs (add 0 * output.sum()), or dispatch "
    "with a sample of this size"
)
_NO_LAYOUT = (
    "tvmbridge does not support a cotangent of the layout {layout}: pass gradient.to_dense(), or "
    f"{LEAVE_TO_EAGER}"
)

# Of more patterns of absent cotangents the one that was compiled first is forgotten.
_MAX_PATTERNS = 16
# So often are gradients looked at before a backward is compiled for its speed alone.
_LOOKS = 2


@dataclass(frozen=True, eq=False)
class PartialBackward:
    """Backward for one pattern: ``gradients`` are the numbers of those that it computes.

    ``copied`` are results that share memory with another tensor, ``layouts`` those of gradients.
    """

    loaded: LoadedModule
    gradients: tuple[int, ...]
    copied: frozenset[int]
    layouts: Mapping[int, Layout]

    def __call__(
        self, values: Sequence[Any], count: int, bound: Bound | None = None
    ) -> list[torch.Tensor | None]:
        """``count`` gradients of what backward reads and the cotangents that arrived."""
        return self.placed(self.results(values, bound), count)

    def results(self, values: Sequence[Any], bound: Bound | None = None) -> list[torch.Tensor]:
        """Return the gradients that it computes."""
        results = self.loaded.run("backward", values, self.copied, bound)
        for number, result in zip(self.gradients, results, strict=True):
            if number in self.layouts:
                self.layouts[number].put_on(result)
        return results

    def placed(self, results: Sequence[torch.Tensor], count: int) -> list[torch.Tensor | None]:
        """Return ``results`` by their numbers among ``count``; None stands for the others."""
        placed: list[torch.Tensor | None] = [None] * count
        for number, result in zip(self.gradients, results, strict=True):
            placed[number] = result
        return placed


class NoPartialBackwards:
    """Of code for any size there are none: zeros stand for what is absent where that is exact."""

    compiled = 0

    def known(self, absent: frozenset[int]) -> PartialBackward | None:
        """None: there is none."""
        return None

    def without(self, absent: frozenset[int]) -> PartialBackward:
        """Refuse.

        Raises:
            BridgeError: always.
        """
        raise BridgeError(_FOR_ANY_SIZE)


class PartialBackwards:
    """The backwards without some of the cotangents, each compiled when it is needed.

    Args:
        parts: the split functions of the module.
        build: a :class:`~tvmbridge.compiler.cached_build.CachedBuild` for its target and options.
        layouts: those of gradients, by number, that are not contiguous.
        device: where the module's tensors are.
    """

    def __init__(
        self,
        parts: SplitModule,
        build: Callable[..., Built],
        layouts: Mapping[int, Layout],
        device: torch.device,
    ) -> None:
        self.compiled = 0
        # The names of their code on disk.
        self.keys: list[str] = []
        # Whether what is absent again and again gets a backward where zeros would do.
        self.for_speed = True
        self._parts = parts
        self._build = build
        self._layouts = layouts
        self._device = device
        self._patterns: dict[frozenset[int], PartialBackward] = {}
        self._asked: Counter[frozenset[int]] = Counter()

    def known(self, absent: frozenset[int]) -> PartialBackward | None:
        """The backward without the cotangents of these numbers, if zeros must not stand for them.

        And if they have been absent before: it is compiled for its speed once, where it can be.

        Raises:
            BridgeError: as :meth:`without`.
        """
        known = self._patterns.get(absent)
        if known is not None:
            return known
        if self._parts.functions:
            return self.without(absent)
        if not self.for_speed:
            return None
        self._asked[absent] += 1
        if self._asked[absent] != _LOOKS + 1 or len(self._patterns) >= _MAX_PATTERNS:
            return None
        try:
            return self.without(absent)
        except BridgeError as error:
            logger.info("gradients are looked at in each backward: %s", error)
            return None

    def without(self, absent: frozenset[int]) -> PartialBackward:
        """The backward without the cotangents of these numbers, compiled now if it is the first.

        Raises:
            BridgeError: it cannot be compiled, or would not be exact; the message says why.
        """
        with compiling():
            if absent not in self._patterns:
                try:
                    backward = self._compile(absent)
                except BridgeError as error:
                    unused = [self._parts.cotangent_of[number] for number in sorted(absent)]
                    raise type(error)(
                        f"backward without a gradient for the outputs {unused}: {error}. Use all "
                        f"outputs (add 0 * output.sum()), or {LEAVE_TO_EAGER}"
                    ) from error
                if len(self._patterns) >= _MAX_PATTERNS:
                    del self._patterns[next(iter(self._patterns))]
                self._patterns[absent] = backward
                self.compiled += 1
            return self._patterns[absent]

    def _compile(self, absent: frozenset[int]) -> PartialBackward:
        parts = self._parts
        function = parts.mod["backward"]
        count = len(parts.cotangent_of)
        gradients = tuple(i for i, reads in enumerate(parts.gradient_reads) if reads - absent)
        bindings = [b for block in function.body.blocks for b in block.bindings]
        results = flat_results(function)
        wanted = build_function(
            "backward", function.params, bindings, [results[i] for i in gradients]
        )
        names = tuple(p.name for p in function.params[-count:])
        dropped = DropCotangents(
            names,
            tuple(names[number] for number in sorted(absent)),
            called(parts.functions, absent),
            str(self._device),
        )
        passes: list[AnyPass] = [dropped, RemoveBorders(), ZeroZapp(names), *tidy_passes()]
        mod = run_passes(tvm.IRModule({"backward": wanted}), passes, [])
        built = self._build(mod, [], self._parts.bundle)
        if built.key:
            self.keys.append(built.key)
        loaded = LoadedModule(built.machine, built.unaligned, self._device)
        logger.info("compiled a backward without the cotangents %s", sorted(absent))
        return PartialBackward(loaded, gradients, built.shared["backward"], self._layouts)


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no element is infinite or NaN; False too where a sum is too large for the dtype."""
    return all(cmath.isfinite(g.sum().item()) for g in gradients)


def refuse_unusual(cotangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse cotangents that compiled code cannot read.

    Raises:
        BridgeError: one stands for a batch of them, or has another layout than ``strided``.
    """
    for cotangent in cotangents:
        if cotangent is None or has_storage(cotangent) or cotangent._is_zerotensor():
            continue
        if cotangent.layout is not torch.strided:
            raise BridgeError(_NO_LAYOUT.format(layout=cotangent.layout))
        raise BridgeError(_NO_BATCHES)
