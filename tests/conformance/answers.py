"""What eager PyTorch answers for a case in all the ways in which it can be asked, and who agrees.

Eager PyTorch itself answers special values in more than one way: kernels treat whole vectors and
the elements left over by different code, and contiguous tensors otherwise than strided ones. Any
of its answers is right.
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

# Of absolute value below which a tolerance for ordinary numbers says nothing.
_SMALL = 1e-6

Leaves = list[Any]


@dataclass(frozen=True)
class Strictness:
    """How much must agree.

    ``local`` says that a result's element comes of those at its place alone: its zeros have
    eager's sign, its small numbers eager's leading digits. Other results are sums, off by the
    rounding of the largest of the inputs, ``magnitude``; where they ``overflow`` depends on the
    order in which they are reckoned. ``signed`` is False where one of two equal numbers is chosen.
    """

    local: bool
    signed: bool = True
    overflow: bool = False
    magnitude: float = 0.0


@dataclass(frozen=True)
class Question:
    """A case, of which gradients are asked too or not, with cotangents changed by ``strewing``."""

    operator: Operator
    case: Case
    gradient: bool
    strewing: Strewing | None = None

    def ask(self, inputs: list[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None) -> Any:
        """The values of PyTorch for ``inputs``, cotangents rounded to ``dtypes``."""
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
    """What is compared of the case ``index``: results, inputs after the call, gradients."""
    gradients = None if values.gradients is None else values.gradients[index]
    return pytree.tree_leaves((values.results[index], values.inputs[index], gradients))


def other_answers(question: Question, theirs: Values, index: int) -> Iterator[Leaves]:
    """Answers of eager PyTorch beside ``theirs``, which it gave for the tensors as they are."""
    with suppress(Exception):
        strided = [_strided(t) for t in inputs_of([question.case])]
        yield leaves_of(question.ask(strided), 0)
    with suppress(Exception):
        yield _in_float64(question, theirs, index)
    with suppress(Exception):
        yield from _repeated(question, leaves_of(theirs, index))


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them."""
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
    """The case many times over in one call: what stood in a rest stands in a vector, or not."""
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
    """Where ``ours`` agrees with no answer of eager PyTorch; None if it does everywhere.

    Args:
        ours: what compiled code gave.
        theirs: eager PyTorch's answer for the same tensors.
        others: its other answers, asked for only where ``ours`` differs from ``theirs``.
        strict: how much must agree.
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
    """Where two tensors agree: NaN, infinities, numbers within rounding, and as ``strict`` says."""
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
    """Where ours lies between eager's answers, or off by rounding of the largest number."""
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
    """Where eager's answers are small numbers and agree with one another in all but rounding."""
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
