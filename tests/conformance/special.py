"""Compile groups of cases once, and run them with special values in many of their elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

import tvmbridge
from tests.conformance.answers import Question, Strictness, difference, leaves_of, other_answers
from tests.conformance.case import Case
from tests.conformance.check import GroupFailed, Outcome, class_of, described, native_class
from tests.conformance.compare import compare
from tests.conformance.evaluate import Calls, Operator, Strewing, Values, evaluate, inputs_of
from tests.conformance.fillings import (
    COTANGENT_FILLINGS,
    FILLINGS,
    Filling,
    fillable,
    filled,
    for_sums,
    strewn,
)


def _strewing(filling: Filling) -> Strewing | None:
    if not filling.cotangents:
        return None

    def change(cotangent: torch.Tensor, position: int) -> torch.Tensor:
        after = strewn(cotangent, filling, position)
        return cotangent if after is None else after

    return change


@dataclass(frozen=True)
class SpecialCheck:
    """The check of groups of cases with special values.

    Args:
        operator: the operator, as a function of tensors.
        dtype: the dtype of the entry; integers of other dtypes keep their values.
        local: whether a result element depends only on the operands' elements at its place.
        signed: whether the inputs determine the sign of a zero in the result.
        joint: the source of the joint function; None checks forward alone.
    """

    operator: Operator
    dtype: torch.dtype
    local: bool
    signed: bool = True
    joint: str | None = None
    _filled: dict[str, dict[str, Case]] = field(default_factory=dict)

    @property
    def fillings(self) -> tuple[Filling, ...]:
        """Return all fillings that a case is tried with."""
        listed = FILLINGS if self.joint is None else FILLINGS + COTANGENT_FILLINGS
        return listed if self.local else tuple(for_sums(f) for f in listed)

    def accepts(self, case: Case) -> bool:
        """Whether eager PyTorch accepts a case with at least one of the fillings."""
        places = fillable(case, self.dtype)
        variants = {f.label: self._accepted(case, f, places) for f in self.fillings}
        self._filled[case.label] = {name: c for name, c in variants.items() if c is not None}
        return bool(self._filled[case.label])

    def _accepted(self, case: Case, filling: Filling, places: Sequence[int]) -> Case | None:
        if filling.cotangents:
            return case if any(case.requires) and self._runs(case) else None
        variant = filled(case, filling, places)
        if variant is None or self._runs(variant):
            return variant
        fit = [p for p in places if (v := filled(case, filling, [p])) and self._runs(v)]
        variant = filled(case, filling, fit)
        return variant if variant is not None and self._runs(variant) else None

    def _runs(self, case: Case) -> bool:
        gradient = self.joint is not None
        with suppress(Exception):
            evaluate(Calls(self.operator, [case]), [case], inputs_of([case]), gradient=gradient)
            return True
        return False

    def group(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcomes of ``cases``, compiled as one module and run with all fillings.

        Raises:
            GroupFailed: there are several cases, and compiling or running them raised an error.
        """
        try:
            return self._outcomes(cases)
        except Exception as error:
            if len(cases) > 1:
                raise GroupFailed from error
            first = cases[0]
            return [Outcome(first.label, class_of(error), described(error), first.ordinary)]

    def _outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        gradient = self.joint is not None
        module = Calls(self.operator, cases).train(gradient)
        options = {"joint": self.joint} if self.joint is not None else None
        with torch.set_grad_enabled(gradient):
            tvmbridge.add_tvm_dispatch(module, tuple(inputs_of(cases)), options=options)
        differences: dict[str, list[str]] = {case.label: [] for case in cases}
        for filling in self.fillings:
            for case, text in self._differences(module, cases, filling):
                differences[case.label].append(text)
        report = tvmbridge.dispatch_report(module)
        if report.fallbacks:
            raise RuntimeError(f"fell back: {report.fallbacks}")
        specialization = report.specializations[0]
        native, aten = (
            sorted(calls)
            for calls in (specialization.native_operators, specialization.aten_operators)
        )
        return [
            Outcome(
                label=case.label,
                result="wrong" if differences[case.label] else native_class(native, aten),
                reason="\n".join(differences[case.label]),
                native=native,
                aten=aten,
                joint=specialization.joint or "",
            )
            for case in cases
        ]

    def _strictness(self, case: Case, filling: Filling) -> Strictness:
        """Return how closely the results of ``case`` must agree when filled with ``filling``.

        Gradients are never compared as local results: they are products in an unspecified order,
        and sums if an operand was broadcast.
        """
        forward = self.joint is None
        if self.local and (forward or len({t.shape for t in case.tensors}) == 1):
            return Strictness(forward, self.signed, filling.overflows)
        tensors = [t.double() for t in case.tensors if not t.is_complex()]
        numbers = [t[t.isfinite()].abs() for t in tensors]
        largest = max((float(n.max()) for n in numbers if n.numel()), default=0.0)
        if filling.cotangents and filling.overflows:
            largest = max(
                [
                    largest,
                    *(torch.finfo(t.dtype).max for t in case.tensors if t.is_floating_point()),
                ]
            )
        return Strictness(False, overflow=filling.overflows, magnitude=largest)

    def _differences(
        self, module: torch.nn.Module, cases: Sequence[Case], filling: Filling
    ) -> Iterator[tuple[Case, str]]:
        """Yield the cases that are wrong with ``filling``, with a description of the difference.

        Cases that ``filling`` does not fit run with their own values and are not compared.
        """
        now = [self._filled[case.label].get(filling.label, case) for case in cases]
        gradient, strewing = self.joint is not None, _strewing(filling)

        def values(which: torch.nn.Module) -> Values:
            return evaluate(which, now, inputs_of(now), gradient=gradient, strewing=strewing)

        try:
            theirs, ours = values(Calls(self.operator, now)), values(module)
        except torch.linalg.LinAlgError:
            # Whether LAPACK's iterations converge depends on the matrix's address in memory.
            return
        for index, (case, variant) in enumerate(zip(cases, now, strict=True)):
            if filling.label not in self._filled[case.label]:
                continue
            question = Question(self.operator, variant, gradient, strewing)
            found = _difference(question, ours, theirs, index, self._strictness(variant, filling))
            if found:
                yield case, f"{filling.label}: {found}"


def _difference(
    question: Question, ours: Values, theirs: Values, index: int, strict: Strictness
) -> str | None:
    shape = compare(ours.results[index], theirs.results[index], values=False)
    if shape:
        return shape
    return difference(
        leaves_of(ours, index),
        leaves_of(theirs, index),
        lambda: list(other_answers(question, theirs, index)),
        strict,
    )
