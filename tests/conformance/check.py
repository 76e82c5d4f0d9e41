"""Run one group of cases compiled and in eager PyTorch, compare, and classify each case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.compare import compare, is_as_near
from tests.conformance.evaluate import Operator, Run, Values, eager, run_group
from tvmbridge.core.errors import BridgeError, BuildError, PassError
from tvmbridge.runtime.parts import NO_PART

Uses = dict[str, dict[str, list[str]]]


@dataclass
class Outcome:
    """The outcome of one case.

    - ``result``: its class, one of ``CLASSES`` in ``table.py``.
    - ``reason``: why it failed or was refused.
    - ``ordinary``: whether no tensor of the case is empty.
    - ``native``: the operators that TVM compiled.
    - ``aten``: the operators that compiled code calls PyTorch's kernels for.
    - ``joint``: the source of the joint function; empty without gradients.
    - ``used``: the claims that served the case: section -> name -> dtypes.
    """

    label: str
    result: str
    reason: str = ""
    ordinary: bool = True
    native: list[str] = field(default_factory=list)
    aten: list[str] = field(default_factory=list)
    joint: str = ""
    used: Uses = field(default_factory=dict)


class GroupFailed(Exception):
    """A group of several cases failed, so its cases must run one by one."""


@dataclass(frozen=True)
class Check:
    """The check of groups of cases of one operator.

    Args:
        operator: the operator, as a function of tensors.
        joint: the source of the joint function; None checks forward alone.
        values: whether values are compared, beside dtypes and shapes.
        admit: whether the compiler may use unproven claims too.
    """

    operator: Operator
    joint: str | None = None
    values: bool = True
    admit: bool = False

    def accepts(self, case: Case) -> bool:
        """Whether eager PyTorch accepts a case; it rejects some variants of samples."""
        return self._eager(case) is not None

    def _eager(
        self,
        case: Case,
        dtype: torch.dtype | None = None,
        rounded: Sequence[torch.dtype] | None = None,
    ) -> Values | None:
        gradient = self.joint is not None
        try:
            return eager(self.operator, case, gradient=gradient, dtype=dtype, rounded=rounded)
        except Exception:
            return None

    def group(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcomes of ``cases``, run as one module.

        Raises:
            GroupFailed: there are several cases, and at least one of them is not right.
        """
        alone = len(cases) == 1
        try:
            run = run_group(self.operator, cases, self.joint, admit=self.admit)
        except Exception as error:
            if not alone:
                raise GroupFailed from error
            return [Outcome(cases[0].label, class_of(error), described(error), cases[0].ordinary)]
        if run.report.fallbacks or run.report.tvm_calls != 1:
            if not alone:
                raise GroupFailed
            # PyTorch runs a module of which no part is compiled, and the report has the reason.
            refused = all(reason.endswith(NO_PART.text) for reason in run.report.fallbacks)
            result = "refused" if refused and not run.report.tvm_calls else "error"
            reason = f"fell back: {run.report.fallbacks}"
            return [Outcome(cases[0].label, result, reason, cases[0].ordinary)]
        outcomes = [self._outcome(run, index, case) for index, case in enumerate(cases)]
        if not alone and any(o.result == "wrong" for o in outcomes):
            raise GroupFailed
        return outcomes

    def _outcome(self, run: Run, index: int, case: Case) -> Outcome:
        specialization = run.report.specializations[0]
        native, aten = (
            sorted(calls)
            for calls in (specialization.native_operators, specialization.aten_operators)
        )
        aten += sorted(f"eager {name}" for name in specialization.eager_functions)
        ours, theirs = _of_case(run.ours, index), _of_case(run.theirs, index)
        difference = self.difference(case, ours, theirs)
        used = {
            section: {name: sorted(dtypes) for name, dtypes in names.items()}
            for section, names in run.observation.used.items()
        }
        return Outcome(
            label=case.label,
            result="wrong" if difference else native_class(native, aten),
            reason=difference or specialization.joint_reason,
            ordinary=case.ordinary,
            native=native,
            aten=aten,
            joint=specialization.joint or "",
            used={str(section): names for section, names in used.items()},
        )

    def difference(self, case: Case, ours: Any, theirs: Any) -> str | None:
        """Describe how ``ours`` differs from ``theirs`` by more than rounding; None if it does not.

        Both are tuples: results, inputs after the call, gradients, and whether each result
        requires a gradient.
        """
        found = compare(ours, theirs, values=self.values)
        return None if found and self._is_rounding(case, ours, theirs) else found

    def _is_rounding(self, case: Case, ours: Any, theirs: Any) -> bool:
        exact = self.exact(case, theirs) if self.values else None
        if exact is None:
            return False
        real = [d for d in _rounded(theirs) if d.is_floating_point]
        return is_as_near(ours[:2], theirs[:2], exact[:2]) and is_as_near(
            ours[2:], theirs[2:], exact[2:], real
        )

    def exact(self, case: Case, theirs: Any) -> Any:
        """Return eager PyTorch's values of the case in float64; None if it raises.

        ``theirs`` are its values in the case's own dtypes, to which cotangents are rounded.
        """
        reference = self._eager(case, torch.float64, _rounded(theirs))
        return None if reference is None else _of_case(reference, 0)


def _rounded(theirs: Any) -> list[torch.dtype]:
    """Return the dtypes of the results that have a cotangent."""
    results, _, _, requires = theirs
    tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [t.dtype for t, wanted in zip(tensors, requires or (), strict=False) if wanted]


def _of_case(values: Values, index: int) -> Any:
    gradients = None if values.gradients is None else values.gradients[index]
    requires = None if values.requires is None else values.requires[index]
    return values.results[index], values.inputs[index], gradients, requires


def native_class(native: Sequence[str], aten: Sequence[str]) -> str:
    if not aten:
        return "native"
    return "mixed" if native else "aten_call"


def class_of(error: Exception) -> str:
    refusal = isinstance(error, BridgeError) and not isinstance(error, BuildError | PassError)
    return "refused" if refusal else "error"


def described(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text[:600]}"
