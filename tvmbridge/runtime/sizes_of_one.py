"""Which calls with sizes of 1 symbolic code serves, although no size of a trace is 1."""

from __future__ import annotations

import logging
from typing import TypeAlias

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import BuildError, CaptureError
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.ones import compute_alike
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.symbolic.code import SymbolicCode, traced_for
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.symbols import Symbols

logger = logging.getLogger(__name__)

# For each symbol, the size that is a constant; None: it is a symbol.
_Constants: TypeAlias = tuple[int | None, ...]


class SizesOfOne:
    """Compares traces in which small sizes are constants with the traces of symbolic code.

    Small are sizes of 1, and sizes of which forward leaves 1: two positions without the first.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        # By code and by the constants of the trace; None: the traces differ.
        self._known: dict[tuple[SymbolicCode, _Constants], SymbolicTrace | None] = {}

    def serves(
        self, code: SymbolicCode, symbols: Symbols, point: Point, mode: Mode, sample: Arguments
    ) -> bool:
        """Whether ``code`` is right for a call at ``point``, in which some sizes are small."""
        constants = code.points.ones(point)
        if not any(constants):
            return False
        key = code, constants
        if key not in self._known:
            self._known[key] = self._like(code, symbols, constants, sample, mode)
        trace = self._known[key]
        return trace is not None and trace.relations.broken(shapes_of(sample)) is None

    def _like(
        self,
        code: SymbolicCode,
        symbols: Symbols,
        constants: _Constants,
        sample: Arguments,
        mode: Mode,
    ) -> SymbolicTrace | None:
        """Return a trace like the code's, in which the symbols with ``constants`` are constants."""
        try:
            trace = self._compiler.apart_or_itself(
                lambda apart: traced_for(
                    self._compiler.module,
                    symbols.without(constants),
                    sample,
                    needs_grad=mode.needs_grad,
                    apart=apart,
                    autocast=mode.autocast,
                    like=code.trace.decisions,
                )
            )
        except (CaptureError, BuildError) as error:
            logger.debug("no trace at sizes of 1: %s", error)
            return None
        points = [
            tuple(n if size is None else size for n, size in zip(point, constants, strict=True))
            for point in (code.points.middle, code.points.most)
        ]
        shapes = [shapes_of(symbols.probe(*sample, point)) for point in points]
        shapes = [each for each in shapes if trace.relations.broken(each) is None]
        alike = bool(shapes) and compute_alike(code.trace, trace, shapes)
        logger.debug("sizes %s: the trace is %s", constants, "alike" if alike else "other")
        return trace if alike else None
