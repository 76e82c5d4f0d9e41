"""Compare a compiled result with all results that eager PyTorch gives for the same values.

Eager PyTorch gives more than one result for special values. Its kernels use different code for
whole vectors and for the remaining elements, and for contiguous and for strided tensors. A
compiled result that agrees with any of the eager results is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.evaluate import (
    Calls,
    Operator,
    Strewing,
    Values,
    cotangents_for,
    evaluate,
    inputs_of,
)

# Numbers of a smaller absolute value pass any absolute tolerance, so they get a relative one.
_SMALL = 1e-6

Leaves = list[Any]


@dataclass(frozen=True)
class Strictness:
    """How closely a result must agree with eager PyTorch.

    - ``local``: each element of the result depends only on the operands' elements at the same
      place. Zeros must then have eager's sign, and small numbers eager's leading digits. Other
      results are sums.
    - ``signed``: whether the sign of a zero must agree; False if the operator returns one of two
      equal operands.
    - ``overflow``: whether a sum may overflow, depending on the order of summation.
    - ``magnitude``: the largest absolute value of the inputs, whose rounding bounds a sum's error.
    """

    local: bool
    signed: bool = True
    overflow: bool = False
    magnitude: float = 0.0


@dataclass(frozen=True)
class Question:
    """A case to evaluate in eager PyTorch.

    - ``gradient``: whether gradients are computed too.
    - ``strewing``: changes the cotangents; None leaves them as drawn.
    """

    operator: Operator
    case: Case
    gradient: bool
    strewing: Strewing | None = None

    def ask(self, inputs: list[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None) -> Any:
        """Return eager PyTorch's values for ``inputs``, with cotangents rounded to ``dtypes``."""
        module = Calls(self.operator, [self.case])
        return evaluate(
            module,
            [self.case],
            inputs,
            gradient=self.gradient,
            rounded=dtypes,
            strewing=self.strewing,
        )


def leaves_of(values: Values, index: int) -> Leaves:
    """Return results, inputs after the call, and gradients of the case ``index`` as a flat list."""
    gradients = None if values.gradients is None else values.gradients[index]
    return pytree.tree_leaves((values.results[index], values.inputs[index], gradients))


def other_answers(question: Question, theirs: Values, index: int) -> Iterator[Leaves]:
    """Yield further eager results of the case: with strided inputs, in float64, and repeated.

    ``theirs`` is eager PyTorch's result for the tensors as they are.
    """
    with suppress(Exception):
        strided = [_strided(t) for t in inputs_of([question.case])]
        yield leaves_of(question.ask(strided), 0)
    with suppress(Exception):
        yield _in_float64(question, theirs, index)
    with suppress(Exception):
        yield from _repeated(question, leaves_of(theirs, index))


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values with gaps between the elements in memory."""
    if not tensor.dim() or not tensor.numel():
        return tensor
    wide = torch.stack([tensor.detach(), tensor.detach()], -1)[..., 0]
    return wide.requires_grad_(tensor.requires_grad)


def _in_float64(question: Question, theirs: Values, index: int) -> Leaves:
    results = pytree.tree_leaves(theirs.results[index])
    tensors = [t for t in results if isinstance(t, torch.Tensor)]
    requires = theirs.requires[index] if theirs.requires is not None else ()
    rounded = [t.dtype for t, wanted in zip(tensors, requires, strict=False) if wanted]
    return leaves_of(question.ask(inputs_of([question.case], torch.float64), rounded), 0)


def _repeated(question: Question, theirs: Leaves) -> Iterator[Leaves]:
    """Yield results of the case when one call (``torch.vmap``) computes many copies of it.

    A kernel handles an element in a vector in one copy, and in the remainder loop in another.
    """
    case, inputs = question.case, inputs_of([question.case])
    smallest = min((t.numel() for t in inputs if t.numel()), default=1)
    count = max(3, min(65, 130 // smallest + 2))
    dims = [0 if t.is_floating_point() else None for t in inputs]
    stacked = [
        torch.stack([t.detach()] * count).requires_grad_(t.requires_grad) if d == 0 else t
        for t, d in zip(inputs, dims, strict=True)
    ]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = case.arguments(tensors)
        return tuple(pytree.tree_leaves(question.operator(*args, **kwargs)))

    torch.manual_seed(0)
    with torch.set_grad_enabled(question.gradient):
        outputs = torch.vmap(call, in_dims=tuple(dims), randomness="same")(*stacked)
    gradients: list[torch.Tensor] = []
    if question.gradient:
        flowing = [o for o in outputs if o.requires_grad]
        single = cotangents_for([o[0] for o in flowing], None, question.strewing)
        cotangents = [torch.stack([c] * count) for c in single]
        wanted = [t for t in stacked if t.requires_grad]
        found = torch.autograd.grad(flowing, wanted, cotangents, allow_unused=True)
        gradients = [g if g is not None else None for g in found]
    for place in (0, count // 2, count - 1):
        results = [o[place].detach() for o in outputs]
        rest = [None if g is None else g[place] for g in gradients]
        between = theirs[len(results) : len(theirs) - len(rest)]
        yield [*results, *between, *rest]


def difference(
    ours: Leaves, theirs: Leaves, others: Callable[[], list[Leaves]], strict: Strictness
) -> str | None:
    """Describe where ``ours`` agrees with no result of eager PyTorch; None if it always agrees.

    Args:
        ours: the leaves from compiled code.
        theirs: the leaves from eager PyTorch for the same tensors.
        others: returns eager PyTorch's further results; called only if ``ours`` differs from
            ``theirs``.
        strict: how closely the leaves must agree.
    """
    answers: list[Leaves] | None = None
    for place, (mine, first) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(first, torch.Tensor) or not isinstance(mine, torch.Tensor):
            continue
        if not mine.numel() or bool(_agrees(mine, first, strict).all()):
            continue
        answers = others() if answers is None else answers
        known = [first, *_fitting(answers, place, first)]
        right = torch.stack([_agrees(mine, answer, strict) for answer in known]).any(0)
        right |= _within_what_eager_is_off(mine, known, strict)
        if not bool(right.all()):
            return _described(place, mine, known, ~right)
    return None


def _fitting(answers: Sequence[Leaves], place: int, first: torch.Tensor) -> list[torch.Tensor]:
    found = [answer[place] for answer in answers if place < len(answer)]
    return [
        t.to(first.dtype) for t in found if isinstance(t, torch.Tensor) and t.shape == first.shape
    ]


def _agrees(ours: torch.Tensor, theirs: torch.Tensor, strict: Strictness) -> torch.Tensor:
    """Return a mask of the elements that agree: NaN, infinities, and numbers within rounding.

    ``strict`` says whether signs of zeros and leading digits of small numbers must agree too.
    """
    if ours.is_complex():
        parts = [[torch.view_as_real(t)[..., i] for t in (ours, theirs)] for i in (0, 1)]
        return _agrees(*parts[0], strict) & _agrees(*parts[1], strict)
    if not theirs.is_floating_point():
        return ours == theirs
    close = torch.isclose(ours, theirs, *_TOLERANCES[theirs.dtype], equal_nan=True)
    if not strict.local:
        return close
    small = theirs.abs().double() < _SMALL
    near = (ours.double() - theirs.double()).abs() <= 0.05 * theirs.abs().double()
    zeros = (ours == 0) & (theirs == 0)
    same_sign = ours.signbit() == theirs.signbit()
    return close & (~small | near) & (~zeros | same_sign | (not strict.signed))


_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def _within_what_eager_is_off(
    ours: torch.Tensor, known: list[torch.Tensor], strict: Strictness
) -> torch.Tensor:
    """Return a mask of the elements that are between eager's results, or off by rounding alone.

    Rounding is taken of the largest number of eager's results and of the inputs.
    """
    if not ours.is_floating_point():
        return torch.zeros_like(ours, dtype=torch.bool)
    wide = torch.stack([answer.double() for answer in known])
    finite = wide.isfinite().all(0) & ours.isfinite()
    low, high = wide.amin(0), wide.amax(0)
    numbers = wide[wide.isfinite()].abs()
    largest = max(float(numbers.max()) if numbers.numel() else 0.0, strict.magnitude)
    slack = 4 * torch.finfo(ours.dtype).eps * largest + (high - low)
    near = finite & (ours.double() >= low - slack) & (ours.double() <= high + slack)
    if strict.local:
        zeros = (wide == 0).all(0) & (ours == 0)
        exact = torch.stack([_equal_small(answer, known[0]) for answer in known]).all(0)
        return near & ~zeros & ~exact
    edge = torch.finfo(ours.dtype).max / 16
    beyond = ~(wide.abs() < edge).all(0) | (strict.magnitude > edge)
    overflown = beyond & ~(ours.abs() < edge)
    unsettled = wide.isfinite().any(0) & ~wide.isfinite().all(0)
    return near | (overflown | unsettled if strict.overflow else False)


def _equal_small(answer: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements where two eager results are small and equal up to rounding."""
    wide = first.double()
    return (wide.abs() < _SMALL) & ((answer.double() - wide).abs() <= 1e-3 * wide.abs())


def _described(
    place: int, ours: torch.Tensor, known: list[torch.Tensor], wrong: torch.Tensor
) -> str:
    where = tuple(wrong.nonzero()[0].tolist())
    theirs = sorted({str(answer[where].item()) for answer in known})
    return (
        f"tensor {place} {tuple(ours.shape)} at {where}: {ours[where].item()} instead of "
        f"{' or '.join(theirs)}; {int(wrong.sum())} of {wrong.numel()} elements"
    )
