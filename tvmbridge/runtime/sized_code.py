"""Symbolic code for a call of a dispatched module: traced with symbols, compiled within bounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from tvmbridge.core.errors import BridgeError, CaptureError
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of, traced_with_symbols
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.symbolic.code import Points, SymbolicCode, compile_symbolic
from tvmbridge.symbolic.probes import points_within
from tvmbridge.symbolic.sizes import DifferentCodeError, Point
from tvmbridge.symbolic.symbols import LEAST_SIZE, Symbols

logger = logging.getLogger(__name__)


def traced_for(
    compiler: Compiler, symbols: Symbols, sample: Arguments, mode: Mode
) -> SymbolicTrace:
    """The module of ``compiler``, traced with ``symbols`` in arguments like those of ``sample``.

    Raises:
        CaptureError: it cannot be traced so.
    """
    dimensions = [d for group in symbols.dimensions for d in group]
    return traced_with_symbols(
        compiler.module,
        *symbols.probe(*sample, symbols.apart(shapes_of(sample))),
        dimensions,
        needs_grad=mode.needs_grad,
        autocast=mode.autocast,
    )


def compiled_for(
    compiler: Compiler,
    names: Sequence[str],
    trace: SymbolicTrace,
    sample: Arguments,
    mode: Mode,
    symbols: Symbols,
    bounds: tuple[Point, ...],
) -> SymbolicCode:
    """Code for all sizes within ``bounds``.

    Compile once more, at other points, where the code differs between the points: a size there
    may be another number of the graph. The least sizes of 2 are then not among those served.

    Args:
        names: what messages call the leaves of the arguments.
        bounds: smallest sizes, of which the first that can be are taken; last, the largest.

    Raises:
        BridgeError: there is none.
    """
    *least, most = bounds
    compiled = partial(
        compile_symbolic,
        compiler.module,
        partial(symbols.probe, *sample),
        trace=trace,
        needs_grad=mode.needs_grad,
        target=compiler.target,
        options=compiler.options,
        packing=compiler.packing,
        autocast=mode.autocast,
    )
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
    """Points without the sizes of ``points``, where code differs; None if there are none."""
    *_, least, most = bounds
    pairs = zip(least, most, strict=True)
    raised = tuple(high if low == LEAST_SIZE else low for low, high in pairs)
    used = {size for point in points.all for size in point}
    try:
        return points_within(trace, symbols, sample, [raised], most, names, used)
    except CaptureError:
        return None
