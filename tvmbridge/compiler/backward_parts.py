"""The parts of a backward as compiled code; :mod:`.cut_backward` says where it is cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import tvm

from tvmbridge.calls.layouts import Layout
from tvmbridge.compiler.backward_code import BackwardLoader, BackwardPart
from tvmbridge.compiler.cut_backward import PartFunction, cut_backward, memory_of
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.errors import BridgeError, first_line
from tvmbridge.core.turns import compiling
from tvmbridge.passes.relax.remove_borders import RemoveBorders
from tvmbridge.passes.relax.return_whole import ReturnWhole
from tvmbridge.pipeline import AnyPass, run_passes, tidy_passes

logger = logging.getLogger(__name__)


class BackwardParts:
    """The parts of the backward of a module, compiled when they are first needed.

    Args:
        layouts: the layouts of gradients that are not contiguous, by number.
        backward: returns the whole backward function.
    """

    def __init__(
        self,
        parts: SplitModule,
        loaded: BackwardLoader,
        layouts: Mapping[int, Layout],
        backward: Callable[[], tvm.relax.Function],
    ) -> None:
        self._parts = parts
        self._loaded = loaded
        self._layouts = layouts
        self._backward = backward
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
        parts = self._parts
        mod = tvm.IRModule({"backward": self._backward()})
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
        loaded, copied = self._loaded(mod)
        return BackwardPart(
            loaded, part.gradients, copied, self._layouts, part.reads, part.takes, done
        )
