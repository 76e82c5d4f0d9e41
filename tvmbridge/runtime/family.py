"""Shape classes: calls that differ only in the sizes of some dimensions share symbolic code."""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.standins import without_inference_tensors
from tvmbridge.core.collection import full_collections_put_off
from tvmbridge.core.errors import BridgeError, BuildError, first_line
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.any_size import shapes_of
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.runtime.background import UnderWayError
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.mode import Flags, Mode, flags_of
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.runtime.progress import progress
from tvmbridge.runtime.sized_code import compiled_for
from tvmbridge.runtime.sizes_of_one import SizesOfOne
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.runtime.trial import try_out
from tvmbridge.symbolic.code import SymbolicCode, traced_for
from tvmbridge.symbolic.probes import DemandedSizeError, OtherBranchError
from tvmbridge.symbolic.related import divided, related
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import DifferentCodeError
from tvmbridge.symbolic.symbols import LEAST_SIZE, Dimension, Symbols

logger = logging.getLogger(__name__)

# The most combinations of sizes that are kept; beyond it the least recently used one is dropped.
_MOST_INSTANCES = 256


# How often code is compiled again for a wider range of sizes, for each key.
_MOST_RANGES = 3
# Where forward permits a call's size and few others, code is tried for sizes from this one on.
_WIDE = 32


class OtherSizesError(BuildError):
    """There is symbolic code for other sizes than those of a call."""


class RefusedGuessError(BuildError):
    """Code with a guessed symbol (the batch's rows) failed; the next call tries without it."""


# Mode, flags, and whether the code is for small sizes (True) or for common ones (False).
_Key: TypeAlias = tuple[Mode, Flags, bool]
_Shapes: TypeAlias = Mapping[int, Sequence[int]]
Retire: TypeAlias = Callable[[Iterable[CompiledEntry]], None]
_Result = TypeVar("_Result")


class Family:
    """A shape class: the calls that differ from a sample only in the sizes of some dimensions.

    Such dimensions are symbols. A point is a tuple with the size of each symbol.

    Args:
        seen: the points of the sample and of the calls so far.
        retire: called with the entries that are no longer kept.
        within: points that the code should serve as well.
    """

    def __init__(
        self,
        compiler: Compiler,
        signature: Signature,
        symbols: Symbols,
        seen: Sequence[Point],
        retire: Retire,
        within: Sequence[Point] = (),
    ) -> None:
        self.retire = retire
        self.compiler = compiler
        self.signature = signature
        self.symbols = symbols
        # guessed: a symbol was added for rows that no call has changed yet.
        # refused: the guess failed, so this shape class serves no more calls.
        self.guessed = self.refused = False
        self.few = 0
        # Symbolic dimensions whose size forward turned out to demand.
        self.demanded: set[Dimension] = set()
        self.why = "; a call with other sizes asks for it"
        self.codes: dict[_Key, SymbolicCode | Reason] = {}
        self.compilations = 0
        self.instances: OrderedDict[Point, Specialization] = OrderedDict()
        # Shape classes for calls in which some symbols are 1, since a size of 1 broadcasts.
        self._ones: dict[Point, Family] = {}
        self._of_one = SizesOfOne(compiler)
        self._tried: list[SymbolicCode] = []
        # The smallest and largest points of compilations in progress.
        self._bounds: dict[_Key, tuple[Point, ...]] = {}
        # The bounds of the last compilation for each key.
        self._compiled_within: dict[_Key, tuple[Point, ...]] = {}
        # Keys whose range of sizes is not widened: forward limits it, or a compilation failed.
        self._limited: set[_Key] = set()
        # The shape class of the sizes at which forward takes another branch; such sizes so far.
        self._branch: Family | None = None
        self._elsewhere = set[Point]()
        self._is_branch = False
        # The symbols of the code: fewer than ``symbols`` if some sizes depend on others.
        self._related = symbols
        self._least = self._usual = self._most = tuple(max(LEAST_SIZE, n) for n in seen[0])
        # Sizes of a call at which the module can be traced; None: calls had equal sizes, or 1.
        self._distinct = next(filter(self._is_distinct, seen), None)
        self._note(*seen)
        self._cover(*within)

    def instance(self, matched: Matched) -> Specialization | None:
        """Return the specialisation for the sizes of a call.

        None: the call differs from the sample in a dimension that is not symbolic.
        """
        point = self.symbols.sizes(matched.leaves)
        sample = [(i, tuple(shape)) for i, shape, *_ in self.signature.tensors]
        if point is None or not self.symbols.are_all(sample, matched.leaves):
            return None
        if self.symbols.equal and not self._related.are_joined(matched.leaves):
            return None
        found = self.instances.get(point)
        if found is None:
            if self._distinct is None and self._is_distinct(point):
                self._distinct = point
            args, kwargs = matched.arguments
            like = self.signature
            found = Specialization(Signature(tuple(args), kwargs, like.forward, like.numbers))
            found.family = self._maker(point, found.signature)
            self.instances[point] = found
            if len(self.instances) > _MOST_INSTANCES:
                _, oldest = self.instances.popitem(last=False)
                self.retire(entry for _, entry in oldest.compiled())
        self.instances.move_to_end(point)
        return found

    def _maker(
        self, point: Point, signature: Signature
    ) -> Callable[[Mode, Matched], CompiledEntry | None]:
        """Return a function that compiles code for a call at ``point``.

        The function returns None if all sizes are 1 and the call needs code for its own sizes. A
        dimension of size 1 may broadcast. If forward does something else then, each choice of
        dimensions of size 1 has a shape class of its own.
        """
        larger = tuple(size >= LEAST_SIZE for size in point)
        if all(larger):
            return self.entry
        if not any(larger):
            return self._entry_of_ones
        rest = tuple(itertools.compress(point, larger))
        family = self._ones.get(larger)
        if family is None:
            symbols = self.symbols.without([None if is_larger else 1 for is_larger in larger])
            family = Family(self.compiler, signature, symbols, [rest], self.retire)
            family.why = self.why
            self._ones[larger] = family
        other = family.entry
        return lambda mode, matched: self._entry_of_ones(mode, matched) or other(mode, matched)

    def _entry_of_ones(self, mode: Mode, matched: Matched) -> CompiledEntry | None:
        """Return the common code for a call with sizes of 1; None if it does not serve them."""
        flags = flags_of(self.compiler.module, matched.leaves)
        point = self._related.sizes(matched.leaves)
        if point is None:
            return None
        self._note(tuple(map(max, self._least, point)))
        code = self._code(mode, flags, matched)
        point = self._related.sizes(matched.leaves)
        if isinstance(code, Reason) or point is None or not code.points.hold(point):
            return None
        serves = partial(self._of_one.serves, code, self._related, point, mode)
        if not self._undisturbed(matched, serves):
            return None
        return self._instantiated(code, point, flags, matched)

    def entry(self, mode: Mode, matched: Matched) -> CompiledEntry:
        """Return the code for a call, which is compiled now if there is none.

        Raises:
            BridgeError: there is no code for these sizes; the message says why.
        """
        flags = flags_of(self.compiler.module, matched.leaves)
        self._note(self._point(matched))
        code = self._code(mode, flags, matched)
        if isinstance(code, Reason):
            if self.has_code:
                raise OtherSizesError(code.text)
            self.refused = self.guessed
            raise (RefusedGuessError if self.guessed else BuildError)(code.text)
        point = self._point(matched)
        if not code.points.hold(point):
            raise OtherSizesError(
                f"code for other sizes is for {code.points.least} to {code.points.most}"
            )
        broken = code.relations.broken(shapes_of(matched.arguments))
        serves = partial(self._of_one.serves, code, self._related, point, mode)
        if broken is not None and not self._undisturbed(matched, serves):
            found = self._entry_of_branch(mode, matched)
            if found is not None:
                return found
            # Code that has served no call yet may be for images that are not square.
            self.refused = self.guessed and not self._tried
            raise OtherSizesError(f"the sizes are not such as forward takes for granted: {broken}")
        return self._instantiated(code, point, flags, matched)

    def _entry_of_branch(self, mode: Mode, matched: Matched) -> CompiledEntry | None:
        """Return code for sizes at which forward takes another branch; None if there is none.

        The first such sizes have code of their own, since forward may permit no others.
        """
        point = self.symbols.sizes(matched.leaves)
        if not self._tried or self._is_branch or point is None or min(point) < LEAST_SIZE:
            return None
        self._elsewhere.add(point)
        if len(self._elsewhere) == 1:
            return None
        if self._branch is None:
            seen = list(self._elsewhere)
            self._branch = Family(self.compiler, self.signature, self.symbols, seen, self.retire)
            self._branch.why, self._branch._is_branch = self.why, True
        try:
            return self._branch.entry(mode, matched)
        except BuildError as error:
            logger.debug("no code for the other branch: %s", error)
            return None

    @property
    def has_code(self) -> bool:
        """Whether there is code for some sizes."""
        return any(isinstance(code, SymbolicCode) for code in self.codes.values())

    def _point(self, matched: Matched) -> Point:
        """Return the values of the code's symbols for a call.

        Raises:
            BuildError: the call's sizes are not related in the way that forward demands.
        """
        point = self._related.sizes(matched.leaves)
        if point is None or min(point) < LEAST_SIZE:
            raise BuildError("the sizes are not such multiples, or sums, as forward demands")
        return point

    def _is_distinct(self, point: Point) -> bool:
        """Whether a trace may have these sizes: none is 1, and different symbols differ."""
        return self.symbols.distinct(point) == point

    def _note(self, *points: Point) -> None:
        """Extend the range of sizes that the next compilation is for to these points of calls."""
        self._cover(*points)
        for point in points:
            self._usual = tuple(map(max, self._usual, point))

    def _cover(self, *points: Point) -> None:
        """Extend the range of sizes that the next compilation is for to these points."""
        for point in points:
            self._least = tuple(
                max(LEAST_SIZE, min(n)) for n in zip(self._least, point, strict=True)
            )
            self._most = tuple(map(max, self._most, point))

    def _code(self, mode: Mode, flags: Flags, matched: Matched) -> SymbolicCode | Reason:
        """Return the code for the sizes of a call, compiled now if it is missing; or a reason.

        Sizes below the range of the first code get code of their own, with narrower vectors.
        """
        common = self.codes.get((mode, flags, False))
        if common is None:
            # A compilation in the background may be for the sizes of earlier calls.
            common = self._compile((mode, flags, False), matched, self._least)
        if isinstance(common, Reason):
            return common
        # The compilation may have related sizes that differ in this call.
        point = self._related.sizes(matched.leaves)
        if point is None or common.points.hold(point):
            return common
        least = common.points.least
        is_small = any(size < bound for size, bound in zip(point, least, strict=True))
        key = mode, flags, is_small
        code = self.codes.get(key)
        if isinstance(code, SymbolicCode):
            points = code.points
            if points.hold(point) or (is_small and points.hold_symbols(point)):
                return code
        small = (LEAST_SIZE,) * len(point)
        least = small if is_small else tuple(map(max, small, least))
        # Another compilation within the same bounds would give the same code.
        is_tried = self._compiled_within.get(key) == self._bounds_from(least)
        if is_tried or key in self._limited or self._is_often_compiled:
            return code or common
        wider = self._compile(key, matched, least)
        return code if isinstance(wider, Reason) and code is not None else wider

    @property
    def _is_often_compiled(self) -> bool:
        return self.compilations >= _MOST_RANGES * len(self.codes)

    def _bounds_from(self, least: Point) -> tuple[Point, ...]:
        """Return the bounds of a compilation now.

        The first two are candidates for its smallest point. The third has the largest sizes that
        calls had. The last has the largest sizes that the code must serve.
        """
        return (least, tuple(map(max, least, self._least)), self._usual, self._most)

    def _compile(self, key: _Key, matched: Matched, least: Point) -> SymbolicCode | Reason:
        mode, name = key[0], type(self.compiler.module).__name__
        what = f"compiling {name} for {mode}, any size"
        # The background process and this one must compile for the same sizes, although calls
        # with other sizes may come in between.
        bounds = self._bounds.setdefault(key, self._bounds_from(least))
        body = partial(self._logged, what, mode, matched, bounds)
        code: SymbolicCode | Reason
        symbols = self._related
        try:
            background = self.compiler.background
            if background is None:
                code = body()
            else:
                code = background.run(what, self, key, body, self.signature)
        except UnderWayError:
            raise
        except Exception as error:
            # Any error: the module's own forward may serve the call all the same.
            self.demanded.update(getattr(error, "dimensions", ()))
            self.few = max(self.few, getattr(error, "sizes", 0))
            code = Reason(Kind.NO_SYMBOLIC, _why_none(error))
            logger.info("%s of %s for %s", code, name, mode)
        self.compilations += 1
        self._compiled_within[key] = self._bounds.pop(key)
        # The compilation may have replaced the symbols by fewer, or by others in larger units.
        wanted = bounds[1:] if self._related is symbols else (self._least, self._most)
        if isinstance(code, Reason) or not all(map(code.points.hold, wanted)):
            self._limited.add(key)
            if least == (LEAST_SIZE,) * len(least):
                # Code for small sizes would be tried at the same points.
                self._limited.add((mode, key[1], True))
        if isinstance(code, SymbolicCode) or key not in self.codes:
            self.codes[key] = code
            for instance in self.instances.values():
                instance.failures.clear()
        return code

    def _logged(
        self, what: str, mode: Mode, matched: Matched, bounds: tuple[Point, ...]
    ) -> SymbolicCode:
        """Compile the code; show progress on a terminal and log the result."""
        start = time.perf_counter()
        with progress(what, self.why), full_collections_put_off():
            code = self._undisturbed(matched, partial(self._compiled_at, mode, bounds))
        logger.info(
            "compiled %s for %s, any size from %s to %s: %.1f s",
            type(self.compiler.module).__name__,
            mode,
            code.points.least,
            code.points.most,
            time.perf_counter() - start,
        )
        return code

    def _undisturbed(self, matched: Matched, body: Callable[[Arguments], _Result]) -> _Result:
        """Return ``body(arguments)`` for the arguments of a call, in the state for traces."""
        with compiling(), tracing_here(), undisturbed():
            arguments = without_inference_tensors(matched.arguments)
            run = partial(body, self.signature.marked(arguments))
            attributes = self.compiler.attributes
            return run() if attributes is None else attributes.compiled(run)

    def _compiled_at(
        self, mode: Mode, bounds: tuple[Point, ...], arguments: Arguments
    ) -> SymbolicCode:
        """Compile code from the sizes of a call, where sizes of 1 are larger.

        Other sizes than those of calls may not fit together: a mask may have as many places as two
        arguments. So the first trace has those of another call, if those of this one must change.
        """
        args, kwargs = arguments
        at = self._related.point_of(shapes_of(arguments))
        if self._related is self.symbols and self._distinct and not self._is_distinct(at):
            args, kwargs = self.symbols.probe(args, kwargs, self._distinct)
        elif min(at) < LEAST_SIZE:
            args, kwargs = self._related.probe(
                args, kwargs, tuple(max(LEAST_SIZE, size) for size in at)
            )
        return self._compiled(mode, (args, kwargs), bounds)

    def _compiled(self, mode: Mode, sample: Arguments, bounds: tuple[Point, ...]) -> SymbolicCode:
        """Compile code, traced at the sizes of a call or else at the largest sizes of all calls.

        Forward may demand the sizes of a call that other calls do not have: where it leaves out the
        first of two positions, one is left, and a size of 1 is no symbol. If forward takes another
        branch from a certain size on, as for images of more than one patch, the code is for larger
        sizes than those of the call.
        """
        before = self._related, self._least, self._usual, self._most
        try:
            return self._compiled_from(mode, sample, bounds)
        except (DemandedSizeError, OtherBranchError) as error:
            largest = bounds[-1]
            if isinstance(error, OtherBranchError):
                largest = tuple(max(_WIDE, 2 * size) for size in largest)
            elsewhere = before[0].probe(*sample, largest)
            if not self._may_differ(mode, error, shapes_of(sample), shapes_of(elsewhere)):
                raise
            self._related, self._least, self._usual, self._most = before
            try:
                code = self._compiled_from(mode, elsewhere, (*bounds[:-1], largest))
            except BridgeError:
                raise error from None
            self.few = max(self.few, getattr(error, "sizes", 0))
            return code

    def _may_differ(
        self,
        mode: Mode,
        error: DemandedSizeError | OtherBranchError,
        here: _Shapes,
        there: _Shapes,
    ) -> bool:
        """Whether there may be code from shapes ``there``, while ``here`` permits few sizes."""
        if isinstance(error, OtherBranchError):
            return not self._is_branch and not any(key[0] == mode for key in self.codes)
        return any(here[leaf][n] != there[leaf][n] for leaf, n in error.dimensions)

    def _compiled_from(
        self, mode: Mode, sample: Arguments, bounds: tuple[Point, ...]
    ) -> SymbolicCode:
        return self.compiler.apart_or_itself(partial(self._traced_from, mode, sample, bounds))

    def _traced_from(
        self, mode: Mode, sample: Arguments, bounds: tuple[Point, ...], apart: bool
    ) -> SymbolicCode:
        symbols = self._related
        trace = traced_for(
            self.compiler.module,
            symbols,
            sample,
            needs_grad=mode.needs_grad,
            apart=apart,
            autocast=mode.autocast,
        )
        if symbols is self.symbols:
            symbols = related(symbols, trace.relations, sample, bounds)
            bounds = self._relate(symbols, sample, bounds)
        compiled = partial(compiled_for, self.compiler, self.signature.names, trace, sample, mode)
        try:
            return compiled(symbols, bounds)
        except DifferentCodeError:
            units = divided(symbols, trace, sample, bounds)
            if units is None or self.has_code:
                raise
            bounds = self._relate(units, sample, bounds)
            return compiled(units, bounds)

    def _relate(
        self, symbols: Symbols, sample: Arguments, bounds: tuple[Point, ...]
    ) -> tuple[Point, ...]:
        """Compile for ``symbols`` from now on; return ``bounds`` as points of these symbols."""
        shapes = [shapes_of(self._related.probe(*sample, point)) for point in bounds]
        self._related = symbols
        found = tuple(map(symbols.point_of, shapes))
        self._least = self._most = found[-1]
        self._usual = found[-2]
        self._cover(*found)
        return (self._least, self._least, self._usual, self._most)

    def _instantiated(
        self, code: SymbolicCode, point: Point, flags: Flags, matched: Matched
    ) -> CompiledEntry:
        compiler = self.compiler
        compiled = code.at(point)
        for i, served in compiled.captured.convention.numbers.items():
            self.signature.numbers[i].narrow(served)
        entry = CompiledEntry(
            ModuleState(compiler.module, compiled.captured), compiled, compiler.packing, flags
        )
        if all(tried is not code for tried in self._tried):
            with compiling(), tracing_here(), undisturbed():
                try_out(entry, matched.leaves)
            for names in compiled.packs:
                compiler.packing.claim(names)
            self._tried.append(code)
        return entry


def _why_none(error: Exception) -> str:
    """Return why there is no code for any size, without the texts of TVM's own checks."""
    if isinstance(error, BridgeError):
        return first_line(error)
    if type(error).__module__.startswith("tvm"):
        logger.debug("TVM cannot compile code for any size", exc_info=error)
        return "TVM cannot compile it at all sample sizes; the log at level DEBUG has TVM's error"
    return f"{type(error).__name__}: {first_line(error)}"
