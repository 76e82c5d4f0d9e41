"""Which calls with sizes of 1 symbolic code serves, although no symbol of a trace is 1."""

from __future__ import annotations

import logging

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import BuildError, CaptureError
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.ones import compute_alike
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.symbolic.code import SymbolicCode, traced_for
from tvmbridge.symbolic.sizes import Point
from tvmbridge.symbolic.symbols import LEAST_SIZE, Symbols

logger = logging.getLogger(__name__)


class SizesOfOne:
    """Compares traces in which sizes of 1 are constants with the traces of symbolic code."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        # By code and by which symbols are larger than 1; None: the traces differ.
        self._known: dict[tuple[SymbolicCode, tuple[bool, ...]], SymbolicTrace | None] = {}

    def serves(
        self, code: SymbolicCode, symbols: Symbols, point: Point, mode: Mode, sample: Arguments
    ) -> bool:
        """Whether ``code`` is right for a call at ``point``, in which some symbols are 1."""
        larger = tuple(size >= LEAST_SIZE for size in point)
        key = code, larger
        if key not in self._known:
            self._known[key] = self._like(code, symbols, larger, sample, mode)
        trace = self._known[key]
        return trace is not None and trace.relations.broken(shapes_of(sample)) is None

    def _like(
        self,
        code: SymbolicCode,
        symbols: Symbols,
        larger: tuple[bool, ...],
        sample: Arguments,
        mode: Mode,
    ) -> SymbolicTrace | None:
        """Return a trace like the code's, in which the symbols that are not ``larger`` are 1."""
        try:
            trace = self._compiler.apart_or_itself(
                lambda apart: traced_for(
                    self._compiler.module,
                    symbols.where(larger),
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
            tuple(n if is_larger else 1 for n, is_larger in zip(point, larger, strict=True))
            for point in (code.points.middle, code.points.most)
        ]
        shapes = [shapes_of(symbols.probe(*sample, point)) for point in points]
        shapes = [each for each in shapes if trace.relations.broken(each) is None]
        alike = bool(shapes) and compute_alike(code.trace, trace, shapes)
        logger.debug("sizes of 1, where %s: the trace is %s", larger, "alike" if alike else "other")
        return trace if alike else None
