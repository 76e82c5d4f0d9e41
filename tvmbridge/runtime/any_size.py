"""Any size: calls that differ in sizes alone are served by symbolic code.

A :class:`Family` is a shape class: a signature in which some dimensions are symbols. It has
symbolic code for each mode. Each combination of sizes that calls have gets a specialisation of its
own, an instance, with its own guards, counters and converted parameters. All instances share the
executable.

By ``dynamic_shapes="auto"`` the dimensions whose sizes calls change become symbols, and a sample
keeps its own code. Dimensions that a spec declares are symbols from the sample or the first call
on. The module's own forward serves a call outside of a Dim's bounds, or with another size in a
dimension that is not declared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.export import AdditionalInputs, ShapesCollection

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import BridgeError, BuildError, first_line
from tvmbridge.core.locks import Lock
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.family import Family, RefusedGuessError, Retire
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.single_sizes import SingleSizes
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.symbolic.declared import DeclaredDimension, Spec, declared, names_no_size, symbols_of
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.symbols import Dimension, Shapes, Symbols

logger = logging.getLogger(__name__)

# The most structures of arguments that calls may compile for a spec.
_MOST_SIGNATURES = 4
# The most shape classes for one structure, each with another choice of symbols for hints.
_MOST_CHOICES = 4
# The most calls for whose sizes, which forward demands, there is further code for other sizes.
_MOST_APART = 3
# Code covers a Dim's upper bound at once if the bound is at most _FAR times the first size, where
# sizes below _NEAR count as _NEAR.
_FAR, _NEAR = 8, 64


def sizes_to_serve(module: nn.Module, given: Any, sample: Arguments | None) -> Any:
    """Check the argument ``dynamic_shapes`` of ``add_tvm_dispatch``.

    Returns:
        A spec as for torch.export, ``"auto"``, or None for no symbols.

    Raises:
        torch._dynamo.exc.UserError: the spec does not fit the sample, by torch.export's check.
        ValueError: the value is no spec, or needs a sample.
    """
    if given is None or (isinstance(given, str) and given == "auto"):
        return given
    if isinstance(given, ShapesCollection | AdditionalInputs):
        if sample is None:
            raise ValueError(f"dynamic_shapes is a {type(given).__name__}, which needs a sample")
        shapes: Any = given
        given = shapes.dynamic_shapes(module, *sample)
    if not isinstance(given, Mapping | tuple | list):
        raise ValueError(
            f"dynamic_shapes is {given!r}; choose None, 'auto', or a spec as of torch.export"
        )
    if sample is not None:
        args, kwargs = sample
        declared(given, module.forward, tuple(args), kwargs)
    return None if names_no_size(given) else given


def reach(bounds: Sequence[DeclaredDimension], point: Point) -> list[Point]:
    """Return a small and a large point within the bounds of Dims, which code should cover too.

    A bound that is far from the size in ``point`` is not used.
    """
    pairs = list(zip(bounds, point, strict=True))
    small = tuple(min(n, b.least) if b.least > 2 else n for b, n in pairs)
    large = tuple(
        n if b.most is None or b.most > _FAR * max(n, _NEAR) else max(n, b.most) for b, n in pairs
    )
    return [small, large]


def _agree(call: Shapes, sample: Shapes, dimensions: Iterable[Dimension]) -> bool:
    """Whether a call has the sample's sizes in ``dimensions``."""
    here, there = dict(call), dict(sample)
    return all(here[leaf][number] == there[leaf][number] for leaf, number in dimensions)


@dataclass(eq=False)
class _SizeGroup:
    """The calls that differ from a signature in sizes alone, and the shape class that serves them.

    - ``signature``: the signature of a sample, or of the first call.
    - ``declared``: the declaration of each symbolic dimension; None: the dimensions that change.
    - ``calls``: the shapes of the calls that have changed the choice of symbols.
    - ``family``: the shape class; None: no call has come yet.
    - ``demanded``: dimensions whose sizes forward demands.
    - ``first``: the specialisation for the signature's sizes, if it is that of a call.
    """

    signature: Signature
    declared: Mapping[Dimension, DeclaredDimension] | None = None
    calls: list[Shapes] = field(default_factory=list)
    family: Family | None = None
    demanded: set[Dimension] = field(default_factory=set)
    first: Specialization | None = None

    def served(self, matched: Matched) -> Specialization | Reason | None:
        """Return the specialisation for a call, or which of its sizes is outside of its Dim.

        None: the shape class does not cover the call.
        """
        dims = self.declared or {}
        for (leaf, number), dim in dims.items():
            reason = dim.refusal(matched.leaves[leaf].shape[number])
            if reason is not None:
                name = self.signature.names[leaf]
                return Reason(Kind.OUTSIDE, f"argument `{name}`: dimension {number}: {reason}")
        family = self.family
        if family is None or family.refused:
            return None
        symbolic = set(family.symbols.all_dimensions)
        demanded = symbolic & family.demanded
        if any(dims[d].free for d in demanded & dims.keys()):
            return None
        if self.declared is None and demanded and symbolic - demanded and not family.has_code:
            self.demanded |= demanded
            return None
        return family.instance(matched)

    def renew(
        self, matched: Matched, compiler: Compiler, retire: Retire, guesses: bool = False
    ) -> Specialization | Reason | None:
        """Replace the shape class by one for this call and all earlier ones.

        ``guesses`` says whether rows that no call has changed may be a symbol. Return the
        specialisation for the call; a mismatch or None if there can be none.
        """
        shapes = [(i, tuple(matched.leaves[i].shape)) for i, *_ in self.signature.tensors]
        sample = [(i, tuple(shape)) for i, shape, *_ in self.signature.tensors]
        calls, guessed = [*self.calls, shapes], False
        if self.declared is None:
            # A call of another size than forward demands needs code for a sample of its own.
            if not _agree(shapes, sample, self.demanded):
                return None
            calls = [c for c in [sample, *calls] if _agree(c, sample, self.demanded)]
            symbols = Symbols.of(*calls)
            if symbols is None or not symbols.dimensions or symbols.sizes(matched.leaves) is None:
                return None
            # A symbol for the rows saves a compilation when an epoch's last batch has fewer, and
            # one for each side of square images when others are not square. Arguments with equal
            # sizes so far, such as the texts of a translation, may have different ones later.
            changed = len(symbols.dimensions)
            if guesses:
                symbols = symbols.with_rows(shapes) or symbols
                symbols = (symbols.with_sides(shapes) or symbols).by_argument(*calls)
            guessed = len(symbols.dimensions) > changed
        else:
            self.demanded |= set() if self.family is None else self.family.demanded
            symbols = symbols_of(self.declared, calls, self.demanded)
            if symbols is None:
                return Reason(Kind.ALL_DEMANDED)
            if not symbols.are_all(sample, matched.leaves):
                return self.signature.mismatch(matched.leaves)
            if symbols.sizes(matched.leaves) is None or len(self.calls) >= _MOST_CHOICES:
                names = (f"`{self.signature.names[leaf]}`[{n}]" for leaf, n in self.declared)
                return Reason(Kind.TOGETHER, ", ".join(names))
        seen = [symbols.point_of(dict(call)) for call in calls]
        within: list[Point] = []
        if self.declared is not None:
            within = reach([self.declared[group[0]] for group in symbols.dimensions], seen[-1])
        retire(entry for i in self.instances() if i is not self.first for _, entry in i.compiled())
        self.calls.append(shapes)
        self.family = family = Family(compiler, self.signature, symbols, seen, retire, within)
        family.guessed, family.demanded = guessed, set(self.demanded)
        if self.declared is not None:
            family.why = ""
        return self.served(matched)

    def instances(self) -> list[Specialization]:
        """Return the specialisations of the shape class."""
        first = [] if self.first is None else [self.first]
        return first if self.family is None else [*first, *self.family.instances.values()]

    def apart(self, matched: Matched) -> _SizeGroup | None:
        """Return a group for a call with other sizes than forward demands; None: it has those."""
        if not self.demanded:
            return None
        args, kwargs = matched.arguments
        like = self.signature
        signature = Signature(tuple(args), kwargs, like.forward, like.numbers)
        first = Specialization(signature)
        return _SizeGroup(signature, demanded=self.demanded, first=first)


class AnySize:
    """The shape classes of a dispatched module.

    - ``single``: the sizes that have code of their own, because there is no symbolic code.
    - ``guesses``: whether symbols may be tried for rows that no call has changed.

    Args:
        retire: called with the entries that are no longer kept.
        spec: the symbolic dimensions, as torch.export's ``dynamic_shapes``; None: the dimensions
            whose sizes calls change.
        guesses: False if forward is known to be for one number of rows.
    """

    def __init__(
        self,
        compiler: Compiler,
        retire: Retire,
        spec: Spec | None = None,
        guesses: bool = True,
    ) -> None:
        self.compiler = compiler
        self.retire = retire
        self.spec = spec
        self.single = SingleSizes(retire)
        self._known: list[_SizeGroup] = []
        self.guesses = guesses
        self._lock = Lock(reentrant=True)

    def renewed(self, compiler: Compiler, retire: Retire) -> AnySize:
        """Return an object with the same rules and no code, for a copy or a forked process."""
        return AnySize(compiler, retire, self.spec, self.guesses)

    def instances(self) -> list[Specialization]:
        """Return all specialisations for calls of these sizes."""
        with self._lock:
            return [i for each in self._known for i in each.instances()]

    def specialization(
        self, known: Sequence[Specialization], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Specialization | Reason | None:
        """Return the specialisation for a call whose sizes none of ``known`` has.

        Returns:
            The specialisation; a mismatch if the sizes are not allowed; None if the call differs
            in more than sizes.
        """
        with self._lock:
            found, misfit = self._of_known(args, kwargs)
            if found is not None:
                return found
            if self.spec is None:
                return self._of_samples(known, args, kwargs)
            if len(self._known) >= _MOST_SIGNATURES:
                return misfit
            try:
                return self._declare(args, kwargs)
            except Exception as error:  # torch.export raises errors of several classes for a spec
                return Reason(Kind.SPEC, first_line(error))

    def _of_known(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Specialization | Reason | None, Reason | None]:
        """Return what serves a call by the signatures so far, and why the first does not fit."""
        misfit: Reason | None = None
        for each in self._known:
            matched = each.signature.match(args, kwargs, any_size=True)
            if isinstance(matched, Reason):
                misfit = misfit or matched
                continue
            if each.first is not None and not each.signature.mismatch(matched.leaves):
                return each.first, None
            found = each.served(matched)
            if found is None and self.spec is not None:
                found = each.renew(matched, self.compiler, self.retire) or Reason(Kind.TOGETHER)
            if found is not None:
                return found, None
        return None, misfit

    def _of_samples(
        self, known: Sequence[Specialization], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Specialization | Reason | None:
        """Return a specialisation for a call that differs in sizes from one of ``known``."""
        others = [k.first for k in self._known if k.first is not None]
        apart: _SizeGroup | None = None
        for specialization in (*known, *others):
            signature = specialization.signature
            matched = signature.match(args, kwargs, any_size=True)
            if isinstance(matched, Reason):
                continue
            each = next((k for k in self._known if k.signature is signature), _SizeGroup(signature))
            self.guesses &= each.family is None or not each.family.refused
            found = each.renew(matched, self.compiler, self.retire, self.guesses)
            if found is not None:
                for _, entry in specialization.compiled():
                    entry.compiled.compile_no_more()
                self._known = [*(k for k in self._known if k is not each), each]
                return found
            apart = apart or each.apart(matched)
        if apart is None or len(others) >= _MOST_APART:
            return None
        self._known.append(apart)
        return apart.first

    def entry(
        self, specialization: Specialization, mode: Mode, matched: Matched
    ) -> CompiledEntry | None:
        """Return symbolic code for a call that belongs to ``specialization``.

        Return None if the call needs code for its own sizes: it has a sample's sizes, or there
        is no symbolic code. After calls of other sizes, the sample's next mode is compiled with
        symbols at once.

        Raises:
            RefusedGuessError: a symbol was added for the batch's rows, and the compilation failed.
            NoRoomError: there is no symbolic code, and more frequent sizes have code of their own.
        """
        if specialization.family is not None:
            try:
                return specialization.family(mode, matched)
            except RefusedGuessError:
                raise
            except BuildError as error:
                few = max((k.family.few for k in self._known if k.family is not None), default=0)
                self.single.admit(specialization, str(error), few)
                return None
        known = (k.family for k in self._known if k.signature is specialization.signature)
        family = next(known, None)
        if family is None or family.refused or family.symbols.point(matched.leaves) is None:
            return None
        try:
            return family.entry(mode, matched)
        except BridgeError as error:
            logger.debug("a sample has code of its own: %s", error)
            return None

    def of_sample(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization:
        """Return the specialisation for a sample of a spec, which is added if it is new.

        Raises:
            torch._dynamo.exc.UserError, ValueError: the declaration does not fit the sample.
            BuildError: there can be no code for the sample.
        """
        with self._lock:
            found = self._of_known(args, kwargs)[0] or self._declare(args, kwargs)
        if isinstance(found, Reason):
            raise BuildError(str(found))
        return found

    def _declare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization | Reason:
        """Add the dimensions that the spec declares for arguments of another structure."""
        assert self.spec is not None
        signature = Signature(args, kwargs, self.compiler.original)
        matched = signature.untaken() or signature.match(args, kwargs)
        each = _SizeGroup(signature, declared(self.spec, self.compiler.original, args, kwargs))
        if isinstance(matched, Reason):
            return matched
        found = each.served(matched) or each.renew(matched, self.compiler, self.retire)
        if isinstance(found, Specialization):
            self._known.append(each)
        return found or Reason(Kind.TOGETHER)

    def forget(self, specialization: Specialization) -> None:
        """Drop the shape class of a sample that could not be compiled."""
        with self._lock:
            self._known = [k for k in self._known if specialization not in k.instances()]
