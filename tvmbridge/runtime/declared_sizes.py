"""Declared sizes: the user names the symbolic dimensions by torch.export's ``dynamic_shapes``.

The dimensions are symbols from the sample or the first call on, so no code is compiled for its
sizes alone. The module's own forward serves a call outside of a Dim's bounds, or with another size
in a dimension that is not declared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.export import AdditionalInputs, ShapesCollection

from tvmbridge.core.errors import BuildError, first_line
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.any_size import AnySize
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.family import Family, Retire
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.symbolic.declared import (
    DeclaredDimension,
    Spec,
    declared,
    names_no_size,
    symbols_of,
)
from tvmbridge.symbolic.sizes import Point
from tvmbridge.symbolic.symbols import Dimension, Shapes

# The most structures of arguments that calls may compile.
_MOST_SIGNATURES = 4
# The most shape classes for one structure, each with another choice of symbols for hints.
_MOST_CHOICES = 4
# Code covers a Dim's upper bound at once if the bound is at most _FAR times the first size, where
# sizes below _NEAR count as _NEAR.
_FAR, _NEAR = 8, 64


def sizes_to_serve(module: nn.Module, given: Any, sample: Arguments | None) -> Any:
    """Check the argument ``dynamic_shapes`` of ``add_tvm_dispatch``.

    Args:
        module: the module to be dispatched.
        given: the value of the argument.
        sample: the sample arguments; None: there is no sample.

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


@dataclass(eq=False)
class _Declared:
    """The calls of one signature, the declared dimensions, and the shape class that serves them.

    - ``signature``: the signature of the first call.
    - ``dimensions``: the declaration of each symbolic dimension.
    - ``calls``: the shapes of the calls that have changed the choice of symbols.
    - ``family``: the shape class; None: no call has come yet.
    """

    signature: Signature
    dimensions: Mapping[Dimension, DeclaredDimension]
    calls: list[Shapes] = field(default_factory=list)
    family: Family | None = None

    def outside(self, matched: Matched) -> Reason | None:
        """Return which dimension of a call has a size outside of its Dim; None if none has."""
        for (leaf, number), dim in self.dimensions.items():
            reason = dim.refusal(matched.leaves[leaf].shape[number])
            if reason is not None:
                name = self.signature.names[leaf]
                return Reason(Kind.OUTSIDE, f"argument `{name}`: dimension {number}: {reason}")
        return None

    def served(self, matched: Matched) -> Specialization | None:
        """Return the specialisation for a call; None if the shape class does not cover it."""
        family = self.family
        if family is None or family.demanded & self._free():
            return None
        return family.instance(matched)

    def renew(self, matched: Matched, compiler: Compiler, retire: Retire) -> Reason | None:
        """Replace the shape class by one for this call and all earlier ones.

        Return a mismatch if that is not possible; otherwise None.
        """
        shapes = [(i, tuple(matched.leaves[i].shape)) for i, *_ in self.signature.tensors]
        demanded = set() if self.family is None else self.family.demanded
        symbols = symbols_of(self.dimensions, [*self.calls, shapes], demanded)
        if symbols is None:
            return Reason(Kind.ALL_DEMANDED)
        sample = [(i, tuple(shape)) for i, shape, *_ in self.signature.tensors]
        if not symbols.are_all(sample, matched.leaves):
            return self.signature.mismatch(matched.leaves)
        if symbols.sizes(matched.leaves) is None or len(self.calls) >= _MOST_CHOICES:
            return Reason(Kind.TOGETHER, ", ".join(self._names()))
        self.calls.append(shapes)
        if self.family is not None:
            entries = [e for i in self.family.instances.values() for _, e in i.compiled()]
            retire(entries)
        seen = [symbols.point_of(dict(call)) for call in self.calls]
        bounds = [self.dimensions[group[0]] for group in symbols.dimensions]
        seen += reach(bounds, seen[-1])
        family = Family(compiler, self.signature, symbols, seen, shapes, retire)
        family.why, family.demanded = "", demanded
        self.family = family
        return None

    def _free(self) -> set[Dimension]:
        """Return the symbolic dimensions that were declared as ``Dim.AUTO``."""
        assert self.family is not None
        symbols = {d for group in self.family.symbols.dimensions for d in group}
        return {d for d in symbols if self.dimensions[d].free}

    def _names(self) -> list[str]:
        return [f"`{self.signature.names[leaf]}`[{number}]" for leaf, number in self.dimensions]


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


class DeclaredSizes(AnySize):
    """The shape classes of a dispatched module whose symbolic dimensions are declared.

    Args:
        compiler: the compiler of the module.
        retire: called with the entries that are no longer kept.
        spec: the declaration, as torch.export's ``dynamic_shapes``.
        forward: the function whose parameters the spec names.
    """

    is_declared = True

    def __init__(
        self, compiler: Compiler, retire: Retire, spec: Spec, forward: Callable[..., Any]
    ) -> None:
        self._declared: list[_Declared] = []
        super().__init__(compiler, retire)
        self.spec = spec
        # Whether calls whose structure of arguments no sample has may compile code.
        self.is_open = True
        self._forward = forward
        self._changing = threading.RLock()

    def renewed(self, compiler: Compiler, retire: Retire) -> DeclaredSizes:
        """Return an object with the same declaration and no code, for a copy of the module."""
        return DeclaredSizes(compiler, retire, self.spec, self._forward)

    def instances(self) -> list[Specialization]:
        """Return all specialisations, including the ones for samples."""
        with self._changing:
            families = [d.family for d in self._declared if d.family is not None]
            return [i for family in families for i in family.instances.values()]

    def specialization(
        self,
        known: Sequence[Specialization],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Specialization | Reason | None:
        """Return the specialisation for a call, or why it has none."""
        with self._changing:
            found, misfit = self._of_known(args, kwargs)
            if found is not None:
                return found
            if not self.is_open or len(self._declared) >= _MOST_SIGNATURES:
                return misfit
            try:
                return self._added(args, kwargs)
            except Exception as error:  # torch.export raises errors of several classes for a spec
                return Reason(Kind.SPEC, first_line(error))

    def of_sample(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization:
        """Return the specialisation for a sample, which is added if it is new.

        Raises:
            torch._dynamo.exc.UserError, ValueError: the declaration does not fit the sample.
            BuildError: there can be no code for the sample.
        """
        with self._changing:
            found, _ = self._of_known(args, kwargs)
            return _refused(found) or self._added(args, kwargs)

    def forget(self, specialization: Specialization) -> None:
        """Drop the shape class of a sample that could not be compiled."""
        with self._changing:
            self._declared = [
                d
                for d in self._declared
                if d.family is None or specialization not in d.family.instances.values()
            ]

    def _of_known(
        self, args: Any, kwargs: Any
    ) -> tuple[Specialization | Reason | None, Reason | None]:
        """Return what serves calls of this structure, or else why no known structure fits.

        Returns:
            ``(found, None)`` if a structure fits; ``found`` is a specialisation, or the mismatch
            of the call's sizes. ``(None, misfit)`` otherwise.
        """
        misfit: Reason | None = None
        for each in self._declared:
            matched = each.signature.match(args, kwargs, any_size=True)
            if not isinstance(matched, Reason):
                return self._of(each, matched), None
            misfit = misfit or matched
        return None, misfit

    def _added(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization:
        signature = Signature(args, kwargs, self._forward)
        matched = signature.untaken() or signature.match(args, kwargs)
        each = _Declared(signature, declared(self.spec, self._forward, args, kwargs))
        found = matched if isinstance(matched, Reason) else self._of(each, matched)
        specialization = _refused(found)
        assert specialization is not None
        self._declared.append(each)
        return specialization

    def _of(self, each: _Declared, matched: Matched) -> Specialization | Reason:
        misfit = each.outside(matched)
        if misfit is not None:
            return misfit
        found = each.served(matched)
        if found is None:
            misfit = each.renew(matched, self.compiler, self.retire)
            found = None if misfit is not None else each.served(matched)
        return found or misfit or Reason(Kind.TOGETHER)


def _refused(found: Specialization | Reason | None) -> Specialization | None:
    """Return ``found``; raise its reason as a BuildError if it is a reason."""
    if isinstance(found, Reason):
        raise BuildError(str(found))
    return found
