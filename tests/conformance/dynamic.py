"""Compile cases with a symbolic first dimension, and call them at other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

import tvmbridge
from tests.conformance.case import Case
from tests.conformance.check import Check, Outcome, described, native_class
from tests.conformance.coverage import operators
from tests.conformance.evaluate import Calls, Values, evaluate, inputs_of
from tests.conformance.samples import cases_of_samples, choose, device
from tvmbridge.core.errors import BridgeError

# At least this many of the other sizes that are tried must be valid for a case.
_OTHERS = 2


def dynamic_cases(name: str, dtype: torch.dtype, limit: int, *, gradient: bool) -> list[Case]:
    """Return samples of one operator and dtype in which a tensor has at least two rows."""
    torch.manual_seed(0)
    samples = operators()[name].sample_inputs(device(), dtype, requires_grad=gradient)
    cases = [case for case in cases_of_samples(samples) if next(_choices(case), None)]
    return choose(cases, limit)


def _choices(case: Case) -> Iterator[tuple[int, ...]]:
    """Yield choices of tensors (by index) whose first dimension becomes the symbol.

    The first choice is all tensors with as many rows as the first one; the second is that one
    alone.
    """
    rows = [t.shape[0] if t.dim() else 0 for t in case.tensors]
    first = next((n for n in rows if n > 1), None)
    if first is None or not case.ordinary:
        return
    alike = tuple(i for i, n in enumerate(rows) if n == first)
    yield alike
    if len(alike) > 1:
        yield alike[:1]


def _resized(case: Case, chosen: Sequence[int], rows: int) -> Case:
    """Return ``case`` with ``rows`` rows in the chosen tensors, repeating existing rows."""
    found: list[Any] = []
    position = 0
    for leaf in case.leaves:
        if isinstance(leaf, torch.Tensor):
            if position in chosen:
                leaf = leaf[torch.arange(rows) % leaf.shape[0]]
            position += 1
        found.append(leaf)
    return replace(case, leaves=tuple(found))


def _spec(case: Case, chosen: Sequence[int]) -> Any:
    """Return the dynamic shapes of a module's call with the tensors of ``case``."""
    rows = Dim("rows", min=2)
    return (tuple({0: rows} if i in chosen else None for i in range(len(case.tensors))),)


def _structure(values: Values | None) -> list[Any] | None:
    """Return what all sizes of one graph have in common: the ranks and dtypes of the results."""
    if values is None:
        return None
    leaves = pytree.tree_leaves(values.results)
    return [(x.dim(), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in leaves]


@dataclass(frozen=True)
class DynamicCheck(Check):
    """The check of cases at sizes that they were not compiled for, one case at a time."""

    _sizes: dict[str, tuple[tuple[int, ...], list[Case]]] = field(default_factory=dict)

    def accepts(self, case: Case) -> bool:
        """Whether eager PyTorch accepts a case with other numbers of rows.

        The number of results and their ranks must be those of the case. If torch.export refuses
        the symbols of one choice, such as the rows of weights that have one per channel, another
        choice is taken.
        """
        plain = self._eager(case)
        if plain is None:
            return False
        found: list[tuple[tuple[int, ...], list[Case]]] = []
        for chosen in _choices(case):
            rows = case.tensors[chosen[0]].shape[0]
            sizes = [n for n in (rows + 3, 2 * rows + 1, rows - 1) if n > 1]
            resized = (_resized(case, chosen, n) for n in sizes)
            others = [c for c in resized if _structure(self._eager(c)) == _structure(plain)]
            if len(others) >= _OTHERS:
                found.append((chosen, others))
        exported = (each for each in found if len(found) < 2 or self._exports(case, each[0]))
        if found:
            self._sizes[case.label] = next(exported, found[0])
        return bool(found)

    def _exports(self, case: Case, chosen: Sequence[int]) -> bool:
        spec = _spec(case, chosen)
        module = Calls(self.operator, [case])
        try:
            torch.export.export(module, tuple(inputs_of([case])), dynamic_shapes=spec)
        except Exception:
            return False
        return True

    def group(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcomes of ``cases``; *refused* if compiled code serves no other size."""
        return [self._alone(case) for case in cases]

    def _alone(self, case: Case) -> Outcome:
        chosen, others = self._sizes[case.label]
        gradient = self.joint is not None
        module = Calls(self.operator, [case]).train(gradient)
        options = {"joint": self.joint} if gradient else None
        try:
            with torch.set_grad_enabled(gradient):
                tvmbridge.add_tvm_dispatch(
                    module,
                    tuple(inputs_of([case])),
                    options=options,
                    dynamic_shapes=_spec(case, chosen),
                    on_fallback="silent",
                )
        except BridgeError as error:
            return Outcome(case.label, "refused", described(error))
        except Exception as error:
            return Outcome(case.label, "error", described(error))
        for other in (case, *others):
            difference = self._difference_at(module, other)
            if difference:
                size = tuple(other.tensors[chosen[0]].shape)
                return Outcome(case.label, "wrong", f"at {size}: {difference}")
        report = tvmbridge.dispatch_report(module)
        if report.tvm_calls < 2:
            return Outcome(case.label, "refused", f"fell back: {report.fallbacks}")
        entry = report.specializations[0]
        native, aten = sorted(entry.native_operators), sorted(entry.aten_operators)
        return Outcome(case.label, native_class(native, aten), native=native, aten=aten)

    def _difference_at(self, module: torch.nn.Module, case: Case) -> str | None:
        """Describe how the module differs from eager PyTorch for the tensors of ``case``."""
        gradient = self.joint is not None
        plain = Calls(self.operator, [case])
        theirs = evaluate(plain, [case], inputs_of([case]), gradient=gradient)
        ours = evaluate(module, [case], inputs_of([case]), gradient=gradient)
        return self.difference(case, _first(ours), _first(theirs))


def _first(values: Values) -> Any:
    gradients = None if values.gradients is None else values.gradients[0]
    requires = None if values.requires is None else values.requires[0]
    return values.results[0], values.inputs[0], gradients, requires
