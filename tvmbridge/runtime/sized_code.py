"""Symbolic code for calls of a dispatched module, compiled within bounds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import partial

from tvmbridge.calls.arguments import Arguments
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.errors import BridgeError
from tvmbridge.graph_capture.any_size import SymbolicTrace
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.symbolic.code import SymbolicCode, compile_symbolic
from tvmbridge.symbolic.probes import points_within
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import DifferentCodeError
from tvmbridge.symbolic.symbols import LEAST_SIZE, Symbols

logger = logging.getLogger(__name__)

# Sizes that code is tried for where there is none for sizes of 2. Each symbol has another one: if
# two symbols are equal, kernels may be equal by chance.
_NEARBY = (5, 7, 11, 13)


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

    Compile again at other points, where the code differs between the points: a size there may be
    another number of the graph. The least sizes of 2 are then not among those served.

    Args:
        bounds: candidates for the smallest point, tried in order; then the largest sizes of calls,
            and the largest sizes to serve.

    Raises:
        BridgeError: no code is possible.
    """
    *least, usual, most = bounds
    args, kwargs = sample
    request = CompileRequest(
        compiler.module,
        tuple(args),
        kwargs,
        needs_grad=mode.needs_grad,
        options=compiler.options,
        target=compiler.target,
        packing=compiler.packing,
        apart=trace.stage.module is not compiler.module,
        autocast=mode.autocast,
    )
    compiled = partial(compile_symbolic, request, symbols, trace=trace)
    points = points_within(trace, symbols, sample, least, [usual, most], names)
    try:
        return compiled(points)
    except DifferentCodeError as error:
        first, used = error, set[int]()
    for begin in raised(points.least, least[-1], most):
        logger.debug("code differs between %s: %s", points.all, first)
        used |= {size for point in points.all for size in point}
        try:
            points = points_within(
                trace, symbols, sample, [begin], [usual, most], names, used, floors=begin
            )
            return compiled(points, floors=begin)
        except BridgeError as error:
            logger.debug("no code from %s on: %s", begin, error)
    raise first


def raised(sampled: Point, least: Point, most: Point) -> list[Point]:
    """Return points to begin at where code differs between the sample sizes.

    The smallest sample sizes of 2 are a little larger first, so that one compilation serves all
    small sizes. If there are none of 2, the least sizes of calls are. At last all sizes are as
    large as calls had them.

    Args:
        sampled: the smallest sample sizes.
        least: the least sizes of calls.
        most: the largest sizes of calls.
    """
    beyond = sampled if LEAST_SIZE in sampled else least
    small = tuple(
        min(high, near) if low == LEAST_SIZE else low
        for low, high, near in zip(beyond, most, itertools.cycle(_NEARBY), strict=False)
    )
    larger = tuple(map(max, least, most))
    return list(dict.fromkeys((small, larger)))
