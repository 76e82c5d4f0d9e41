"""Backward for calls in which some cotangents are absent: their outputs got no gradient.

The compiled backward takes a cotangent for every output. Zeros for an absent cotangent give eager
PyTorch's gradients only if all derivatives on its paths are finite: zero times infinity is NaN. A
*partial backward* is compiled without the absent cotangents, and used from then on, in three cases:
a gradient is not finite, a custom autograd function may not be linear, or the same cotangents are
absent again and again. The last case is for speed: checking all gradients for finite values costs
more than a pass over their memory.
"""

from __future__ import annotations

import cmath
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import tvm

from tvmbridge.compiler.backward_code import BackwardLoader, BackwardPart, PartialBackward
from tvmbridge.compiler.cut_backward import PartFunction, cut_backward, memory_of
from tvmbridge.compiler.halves import CompiledHalves
from tvmbridge.compiler.split import build_function
from tvmbridge.core.errors import LEAVE_TO_EAGER, BridgeError, first_line
from tvmbridge.core.torch_private import has_storage
from tvmbridge.core.turns import compiling
from tvmbridge.differentiation.custom_functions import called
from tvmbridge.passes.base import flat_results
from tvmbridge.passes.relax.drop_cotangents import DropCotangents
from tvmbridge.passes.relax.remove_borders import RemoveBorders
from tvmbridge.passes.relax.return_whole import ReturnWhole
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

# The most partial backwards kept; beyond that, the one compiled first is dropped.
_MAX_PATTERNS = 16
# How often gradients are checked before a partial backward is compiled just for speed.
_LOOKS = 2


class NoPartialBackwards:
    """The partial backwards of symbolic code: none, only zeros for absent cotangents if exact."""

    compiled = 0
    halves = None

    def known(self, absent: frozenset[int]) -> PartialBackward | None:
        """Return None: there is no partial backward."""
        return None

    def without(self, absent: frozenset[int]) -> PartialBackward:
        """Raise an error: zeros are not exact, and no partial backward can be compiled.

        Raises:
            BridgeError: always.
        """
        raise BridgeError(_FOR_ANY_SIZE)


class PartialBackwards:
    """The partial backwards of a module, each compiled when it is first needed.

    Args:
        loader: compiles the functions of backward.

    Attributes:
        parts: the whole backward, cut into parts that run one after another.
        halves: the gradients of inputs and those of weights in two functions.
    """

    def __init__(self, loader: BackwardLoader) -> None:
        self.compiled = 0
        # Whether to compile a partial backward for cotangents that are absent again and again.
        self.for_speed = True
        self._loader = loader
        self.parts = BackwardParts(loader)
        self.halves = CompiledHalves(loader)
        self._patterns: dict[frozenset[int], PartialBackward] = {}
        self._asked: Counter[frozenset[int]] = Counter()

    @property
    def keys(self) -> list[str]:
        """The names of the code in the cache, of partial backwards, parts and halves."""
        return self._loader.keys

    def known(self, absent: frozenset[int]) -> PartialBackward | None:
        """Return the partial backward to use at once, or None to try zeros first.

        It is used at once if it is compiled already, or if the module has custom autograd
        functions. It is also used if ``absent`` was seen often enough to compile it for speed.

        Raises:
            BridgeError: the module has custom autograd functions, and :meth:`without` raised.
        """
        known = self._patterns.get(absent)
        if known is not None:
            return known
        if self._loader.parts.functions:
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
        """Return the partial backward without these cotangents; compile it now if necessary.

        Raises:
            BridgeError: it cannot be compiled, or would not be exact; the message says why.
        """
        with compiling():
            if absent not in self._patterns:
                try:
                    backward = self._compile(absent)
                except BridgeError as error:
                    unused = [self._loader.parts.cotangent_of[number] for number in sorted(absent)]
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
        parts = self._loader.parts
        function = self._loader.whole()
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
            str(self._loader.device),
        )
        passes: list[AnyPass] = [dropped, RemoveBorders(), ZeroZapp(names), *tidy_passes()]
        mod = run_passes(tvm.IRModule({"backward": wanted}), passes, [])
        loaded, copied = self._loader(mod)
        logger.info("compiled a backward without the cotangents %s", sorted(absent))
        return PartialBackward(loaded, gradients, copied, self._loader.layouts)


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no element is infinite or NaN; False also if a sum overflows the dtype."""
    return all(cmath.isfinite(g.sum().item()) for g in gradients)


def refuse_unusual(cotangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse cotangents that compiled code cannot read.

    Raises:
        BridgeError: a cotangent is a batch of cotangents under vmap, or is not ``strided``.
    """
    for cotangent in cotangents:
        if cotangent is None or has_storage(cotangent) or cotangent._is_zerotensor():
            continue
        if cotangent.layout is not torch.strided:
            raise BridgeError(_NO_LAYOUT.format(layout=cotangent.layout))
        raise BridgeError(_NO_BATCHES)


class BackwardParts:
    """The parts of the backward of a module, compiled when they are first needed."""

    def __init__(self, loader: BackwardLoader) -> None:
        self._loader = loader
        self._cuts: dict[float, tuple[BackwardPart, ...]] = {}

    def cut(
        self, packed: Mapping[str, Sequence[str]], part_bytes: float
    ) -> tuple[BackwardPart, ...]:
        """Return backward as several parts, compiled at the first call; none if that does not pay.

        Args:
            packed: the names of the parameters of each packed weight, by the name of its primal.
            part_bytes: a part ends as soon as its gradients have this size.
        """
        found = self._cuts.get(part_bytes)
        if found is None:
            with compiling():
                found = self._cuts.get(part_bytes)
                if found is None:  # no other thread has compiled them meanwhile
                    found = self._cuts[part_bytes] = self._cut_or_whole(packed, part_bytes)
        return found

    def _cut_or_whole(
        self, packed: Mapping[str, Sequence[str]], part_bytes: float
    ) -> tuple[BackwardPart, ...]:
        try:
            return self._cut(packed, part_bytes)
        except BridgeError as error:
            logger.info("backward is not cut into parts: %s", first_line(error))
        except Exception as error:  # The whole backward serves the call all the same.
            logger.warning("backward cannot be cut into parts: %s", first_line(error))
        return ()

    def _cut(
        self, packed: Mapping[str, Sequence[str]], part_bytes: float
    ) -> tuple[BackwardPart, ...]:
        parts = self._loader.parts
        mod = tvm.IRModule({"backward": self._loader.whole()})
        passes: list[AnyPass] = [RemoveBorders()] if parts.functions else []
        function = run_passes(mod, [*passes, *tidy_passes()], [])["backward"]
        memory = memory_of(parts.reads, parts.wanted, packed)
        cut = cut_backward(function, len(parts.cotangent_of), memory, part_bytes)
        last = {place: number for number, part in enumerate(cut) for place in part.takes}
        found = tuple(
            self._part(part, tuple(p for p, n in last.items() if n == number))
            for number, part in enumerate(cut)
        )
        logger.info("backward has %d parts", len(found) or 1)
        return found

    def _part(self, part: PartFunction, done: tuple[int, ...]) -> BackwardPart:
        mod = tvm.IRModule({"backward": part.function})
        mod = run_passes(mod, [*tidy_passes(), ReturnWhole()], [])
        loaded, copied = self._loader(mod)
        layouts = self._loader.layouts
        return BackwardPart(loaded, part.gradients, copied, layouts, part.reads, part.takes, done)
