"""Run a group of cases as one module: results and gradients, compiled and in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import tvmbridge
from tests.conformance.case import Case
from tvmbridge.core.admission import Usage, recorded_uses

Operator = Callable[..., Any]

# Changes the cotangent of a case's output; the second argument is the output's position.
Strewing = Callable[[torch.Tensor, int], torch.Tensor]


class Calls(nn.Module):
    """A module that calls one operator for several cases; its inputs are all their tensors."""

    def __init__(self, operator: Operator, cases: Sequence[Case]) -> None:
        super().__init__()
        self.operator = operator
        self.cases = list(cases)

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        results, position = [], 0
        for case in self.cases:
            count = len(case.tensors)
            args, kwargs = case.arguments(tensors[position : position + count])
            results.append(self.operator(*args, **kwargs))
            position += count
        return results


@dataclass(frozen=True)
class Values:
    """The values that running a group gave, case by case.

    - ``results``: the results of each case.
    - ``inputs``: the tensors of each case after the call, which may have written into them.
    - ``gradients``: the gradients of each case, in the order of its tensors that require one; None
      if none were computed.
    - ``requires``: for each tensor of the results, whether it requires a gradient; None likewise.
    """

    results: list[Any]
    inputs: list[list[torch.Tensor]]
    gradients: list[list[torch.Tensor | None]] | None = None
    requires: list[list[bool]] | None = None


@dataclass(frozen=True)
class Run:
    """Values of compiled code and of eager PyTorch, the dispatch report, and the claims used."""

    ours: Values
    theirs: Values
    report: tvmbridge.DispatchReport
    observation: Usage


def inputs_of(cases: Sequence[Case], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return copies of all tensors of ``cases``, floating ones in ``dtype`` if it is given."""
    copies = []
    for case in cases:
        for tensor, requires in zip(case.tensors, case.requires, strict=True):
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            copies.append(copy_of(tensor, wanted).requires_grad_(requires))
    return copies


def copy_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy with the same strides; a dimension of stride 0 keeps that stride."""
    if 0 in tensor.stride() and tensor.numel() and not tensor.is_contiguous():
        short = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
        return copy_of(tensor[tuple(short)].clone(), dtype).expand_as(tensor).detach()
    if not tensor.numel():
        return tensor.detach().clone().to(dtype)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return copy.copy_(tensor.detach())


def evaluate(
    module: nn.Module,
    cases: Sequence[Case],
    inputs: list[torch.Tensor],
    *,
    gradient: bool,
    rounded: Sequence[torch.dtype] | None = None,
    strewing: Strewing | None = None,
) -> Values:
    """Run ``module`` from a fixed seed, and its gradient for fixed random cotangents.

    A case gets the same cotangents in every group. The cotangents are rounded to the dtypes
    ``rounded`` (None: the dtypes of the outputs), and then changed by ``strewing``.
    """
    torch.manual_seed(0)
    with torch.set_grad_enabled(gradient):
        results = module(*inputs)
    rest = iter(inputs)
    after = [[next(rest).detach() for _ in case.tensors] for case in cases]
    if not gradient:
        return Values(results, after)
    of_cases = [[t for t in _tensors(r) if t.requires_grad] for r in results]
    outputs = [t for of_case in of_cases for t in of_case]
    cotangents = [c for of_case in of_cases for c in cotangents_for(of_case, rounded, strewing)]
    leaves = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    flowing = iter(found)
    gradients = [[next(flowing) for wanted in case.requires if wanted] for case in cases]
    requires = [[t.requires_grad for t in _tensors(r)] for r in results]
    return Values([_detached(r) for r in results], after, gradients, requires)


def cotangents_for(
    outputs: Sequence[torch.Tensor],
    rounded: Sequence[torch.dtype] | None,
    strewing: Strewing | None = None,
) -> list[torch.Tensor]:
    """Return random cotangents: the same numbers for every dtype, then changed by ``strewing``."""
    generator = torch.Generator().manual_seed(1)
    numbers = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    dtypes = rounded or [o.dtype for o in outputs]
    narrow = [number.to(dtype) for number, dtype in zip(numbers, dtypes, strict=True)]
    if strewing is not None:
        narrow = [strewing(number, place) for place, number in enumerate(narrow)]
    return [number.to(output.dtype) for number, output in zip(narrow, outputs, strict=True)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _detached(value: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)


def eager(
    operator: Operator,
    case: Case,
    *,
    gradient: bool,
    dtype: torch.dtype | None = None,
    rounded: Sequence[torch.dtype] | None = None,
) -> Values:
    """Return the values of eager PyTorch; the operator's exceptions pass through."""
    module, inputs = Calls(operator, [case]), inputs_of([case], dtype)
    return evaluate(module, [case], inputs, gradient=gradient, rounded=rounded)


def run_group(operator: Operator, cases: Sequence[Case], joint: str | None, *, admit: bool) -> Run:
    """Dispatch a group as one module and run it.

    Args:
        operator: the operator, as a function of tensors.
        cases: the calls of the operator.
        joint: the source of the joint function; None runs forward alone.
        admit: whether the compiler may use unproven claims too.
    """
    gradient = joint is not None
    theirs = evaluate(Calls(operator, cases), cases, inputs_of(cases), gradient=gradient)
    module = Calls(operator, cases).train(gradient)
    inputs = inputs_of(cases)
    options = {"joint": joint} if joint is not None else None
    with recorded_uses(everything=admit) as observation, torch.set_grad_enabled(gradient):
        tvmbridge.add_tvm_dispatch(module, tuple(inputs), options=options)
    ours = evaluate(module, cases, inputs, gradient=gradient)
    return Run(ours, theirs, tvmbridge.dispatch_report(module), observation)
