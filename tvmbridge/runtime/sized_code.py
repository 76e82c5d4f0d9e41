"""Symbolic code for calls of a dispatched module, compiled within bounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.errors import BridgeError, CaptureError
from tvmbridge.graph_capture.any_size import SymbolicTrace
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.symbolic.code import Points, SymbolicCode, compile_symbolic
from tvmbridge.symbolic.probes import points_within
from tvmbridge.symbolic.sizes import DifferentCodeError, Point
from tvmbridge.symbolic.symbols import LEAST_SIZE, Symbols

logger = logging.getLogger(__name__)


def compiled_for(
    compiler: Compiler,
    names: Sequence[str],
    trace: SymbolicTrace,
    sample: Arguments,
    mode: Mode,
    symbols: Symbols,
    bounds: tuple[Point, ...],
) -> SymbolicCode:
    """Compile code for all sizes within ``bounds``.

    Compile once more, at other points, where the code differs between the points: a size there
    may be another number of the graph. The least sizes of 2 are then not among those served.

    Args:
        compiler: the compiler of the module.
        names: the names of the arguments' leaves, for messages.
        trace: the module traced with the symbols.
        sample: arguments of some size.
        mode: the mode to compile for.
        symbols: the symbolic dimensions.
        bounds: candidates for the smallest point, tried in order; the last element is the
            largest point.

    Raises:
        BridgeError: no code is possible.
    """
    *least, most = bounds
    args, kwargs = sample
    request = CompileRequest(
        compiler.module,
        tuple(args),
        kwargs,
        needs_grad=mode.needs_grad,
        options=compiler.options,
        target=compiler.target,
        packing=compiler.packing,
        autocast=mode.autocast,
    )
    compiled = partial(compile_symbolic, request, partial(symbols.probe, *sample), trace=trace)
    points = points_within(trace, symbols, sample, least, most, names)
    try:
        return compiled(points)
    except DifferentCodeError as error:
        others = _other_points(points, trace, symbols, sample, bounds, names)
        if others is None:
            raise
        logger.debug("code differs between %s: %s", points.all, error)
        try:
            return compiled(others)
        except BridgeError as again:
            logger.debug("and between %s: %s", others.all, again)
            raise error from None


def _other_points(
    points: Points,
    trace: SymbolicTrace,
    symbols: Symbols,
    sample: Arguments,
    bounds: tuple[Point, ...],
    names: Sequence[str],
) -> Points | None:
    """Return points without the sizes of ``points``, where code differs; None if there are none."""
    *_, least, most = bounds
    pairs = zip(least, most, strict=True)
    raised = tuple(high if low == LEAST_SIZE else low for low, high in pairs)
    used = {size for point in points.all for size in point}
    try:
        return points_within(trace, symbols, sample, [raised], most, names, used)
    except CaptureError:
        return None
