"""Symbolic code for a call of a dispatched module: traced with symbols, compiled within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvmbridge.compiler.request import CompileRequest
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of, traced_with_symbols
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.symbolic.code import SymbolicCode, compile_symbolic
from tvmbridge.symbolic.probes import points_within
from tvmbridge.symbolic.sizes import Point
from tvmbridge.symbolic.symbols import Symbols


def traced_for(
    compiler: Compiler, symbols: Symbols, sample: Arguments, mode: Mode
) -> SymbolicTrace:
    """Trace the module of ``compiler`` with ``symbols`` in place of some sizes of ``sample``.

    Raises:
        CaptureError: the module cannot be traced with these symbols.
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
    """Compile code for all sizes within ``bounds``.

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
    points = points_within(trace.relations, symbols, sample, least, most, names)
    return compile_symbolic(request, partial(symbols.probe, *sample), points, trace)
