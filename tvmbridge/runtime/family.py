"""Symbolic code for calls that differ from a sample in the sizes of some dimensions alone."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from tvmbridge.core.errors import BridgeError, BuildError, first_line
from tvmbridge.graph_capture.any_size import shapes_of, traced_with_symbols
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.graph_capture.trace.standins import without_inference_tensors
from tvmbridge.runtime.background import UnderWayError
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Flags, Mode, flags_of
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.runtime.progress import progress
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.runtime.trial import try_out
from tvmbridge.symbolic.code import SymbolicCode, compile_symbolic
from tvmbridge.symbolic.probes import Dimension, Shapes, Symbols, points_within
from tvmbridge.symbolic.sizes import Point

logger = logging.getLogger(__name__)

# So many choices of sizes are kept; of further ones those go that were not used for longest.
_MOST_INSTANCES = 256


# So often is code compiled for a wider range of sizes.
_MOST_RANGES = 3


class RefusedGuessError(BuildError):
    """There is no code for a guess at what is symbolic: the next call makes a family without it."""


Retire: TypeAlias = Callable[[Iterable[CompiledEntry]], None]


class Family:
    """Calls that differ from a sample in the sizes of symbolic dimensions alone.

    Args:
        compiler: of the dispatched module.
        signature: the sample's.
        symbols: its symbolic dimensions.
        seen: the sizes that calls had so far, the sample's among them.
        shapes: those of the tensors of the call that it was made for.
        retire: called with the entries that it keeps no longer.
    """

    def __init__(
        self,
        compiler: Compiler,
        signature: Signature,
        symbols: Symbols,
        seen: Sequence[Point],
        shapes: Shapes,
        retire: Retire,
    ) -> None:
        self.retire = retire
        self.compiler = compiler
        self.signature = signature
        self.symbols = symbols
        self.shapes = shapes
        # More is symbolic than has changed; and there is no code for that.
        self.guessed = self.refused = False
        # What is symbolic, and has a size that forward demands.
        self.demanded: set[Dimension] = set()
        self.why = "; a call with other sizes asks for it"
        self.codes: dict[tuple[Mode, Flags], SymbolicCode | str] = {}
        self.compilations = 0
        self.instances: OrderedDict[Point, Specialization] = OrderedDict()
        self._tried: list[SymbolicCode] = []
        # Of compilations under way: the sizes that they are for.
        self._bounds: dict[tuple[Mode, Flags], tuple[Point, Point]] = {}
        self._least = tuple(map(min, zip(*seen, strict=True)))
        self._most = tuple(map(max, zip(*seen, strict=True)))

    def instance(self, matched: Matched) -> Specialization | None:
        """The specialisation for a call; None: other dimensions than the symbols differ."""
        point = self.symbols.point(matched.leaves)
        sample = [(i, tuple(shape)) for i, shape, *_ in self.signature.tensors]
        if point is None or not self.symbols.are_all(sample, matched.leaves):
            return None
        found = self.instances.get(point)
        if found is None:
            args, kwargs = matched.arguments
            found = Specialization(Signature(tuple(args), kwargs, self.signature.forward))
            found.family = partial(self.entry, point)
            self.instances[point] = found
            if len(self.instances) > _MOST_INSTANCES:
                _, oldest = self.instances.popitem(last=False)
                self.retire(entry for _, entry in oldest.compiled())
        self.instances.move_to_end(point)
        return found

    def entry(self, point: Point, mode: Mode, matched: Matched) -> CompiledEntry:
        """Code for a call with the sizes ``point``.

        Raises:
            BridgeError: there is none; the message says why.
        """
        flags = flags_of(self.compiler.module, matched.leaves)
        code = self.codes.get((mode, flags))
        self._least = tuple(map(min, self._least, point))
        self._most = tuple(map(max, self._most, point))
        # That compiled in the background may be for the sizes of earlier calls.
        while code is None or self._is_for_less(code, point):
            wider = self._compile(mode, flags, matched)
            if code is None or isinstance(wider, SymbolicCode):
                code = self.codes[mode, flags] = wider
                for instance in self.instances.values():
                    instance.failures.clear()
            if isinstance(wider, str):
                break
        if isinstance(code, str):
            self.refused = self.guessed
            raise (RefusedGuessError if self.guessed else BuildError)(code)
        if not code.points.hold(point):
            raise BuildError(
                f"code for other sizes is for {code.points.least} to {code.points.most}"
            )
        broken = code.relations.broken(shapes_of(matched.arguments))
        if broken is not None:
            raise BuildError(f"the sizes are not such as forward takes for granted: {broken}")
        return self._instantiated(code, point, flags, matched)

    def _is_for_less(self, code: SymbolicCode | str, point: Point) -> bool:
        """Whether code is for other sizes, and may be compiled for more."""
        outside = isinstance(code, SymbolicCode) and not code.points.hold(point)
        return outside and self.compilations < _MOST_RANGES * len(self.codes)

    def _compile(self, mode: Mode, flags: Flags, matched: Matched) -> SymbolicCode | str:
        name = type(self.compiler.module).__name__
        what = f"compiling {name} for {mode}, any size"
        # What two processes compile is for the same sizes, whatever comes between.
        bounds = self._bounds.setdefault((mode, flags), (self._least, self._most))
        body = partial(self._told, what, mode, matched, bounds)
        code: SymbolicCode | str
        try:
            background = self.compiler.background
            if background is None:
                code = body()
            else:
                code = background.run(what, self, (mode, flags), body, self.signature)
        except UnderWayError:
            raise
        except Exception as error:
            # Whatever it is, the module's own forward may do better.
            self.demanded.update(getattr(error, "dimensions", ()))
            kind = "" if isinstance(error, BridgeError) else f"{type(error).__name__}: "
            code = f"no code for any size: {kind}{first_line(error)}"
            logger.info("%s of %s for %s", code, name, mode)
        self.compilations += 1
        del self._bounds[mode, flags]
        return code

    def _told(
        self, what: str, mode: Mode, matched: Matched, bounds: tuple[Point, Point]
    ) -> SymbolicCode:
        """The code; the log and a terminal tell of it."""
        start = time.perf_counter()
        with progress(what, self.why), tracing_here(), undisturbed():
            args, kwargs = without_inference_tensors(matched.arguments)
            code = self._compiled(mode, args, kwargs, *bounds)
        logger.info(
            "compiled %s for %s, any size from %s to %s: %.1f s",
            type(self.compiler.module).__name__,
            mode,
            code.points.least,
            code.points.most,
            time.perf_counter() - start,
        )
        return code

    def _compiled(
        self, mode: Mode, args: Any, kwargs: Any, least: Point, most: Point
    ) -> SymbolicCode:
        compiler, symbols, names = self.compiler, self.symbols, self.signature.names
        dimensions = [d for group in symbols.dimensions for d in group]
        trace = traced_with_symbols(
            compiler.module,
            *symbols.probe(args, kwargs, symbols.apart(shapes_of((args, kwargs)))),
            dimensions,
            needs_grad=mode.needs_grad,
            autocast=mode.autocast,
        )
        return compile_symbolic(
            compiler.module,
            partial(symbols.probe, args, kwargs),
            points_within(trace.relations, symbols, (args, kwargs), least, most, names),
            trace,
            needs_grad=mode.needs_grad,
            target=compiler.target,
            options=compiler.options,
            packing=compiler.packing,
            autocast=mode.autocast,
        )

    def _instantiated(
        self, code: SymbolicCode, point: Point, flags: Flags, matched: Matched
    ) -> CompiledEntry:
        compiler = self.compiler
        compiled = code.at(point)
        entry = CompiledEntry(
            ModuleState(compiler.module, compiled.captured), compiled, compiler.packing, flags
        )
        if all(tried is not code for tried in self._tried):
            with tracing_here(), undisturbed():
                try_out(entry, matched.leaves)
            for names in compiled.packs:
                compiler.packing.claim(names)
            self._tried.append(code)
        return entry
