"""Find which outputs send a gradient to which primals in eager PyTorch, and its memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tvmbridge.calls.layouts import Layout, layout_of
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import DataDependentOutputException
from tvmbridge.core.types import InputDescriptor
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.graph_capture.observe.refusal import first_paragraph


def reached_by_gradients(
    rehearsal: Rehearsal,
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    layouts: dict[int, Layout | None],
) -> dict[int, frozenset[int]]:
    """Return, for each wanted primal, the numbers of the ``outputs`` that send it a gradient.

    Args:
        layouts: receives, by the primal's position, the memory layout of its gradient. If several
            outputs send one, the first output's counts.

    Raises:
        UnsupportedOperatorError: PyTorch cannot differentiate on fake tensors, or a gradient is
            sparse.
    """
    wanted = rehearsal.wanted
    reached: dict[int, frozenset[int]] = {position: frozenset() for position in wanted}
    for number, output in enumerate(outputs):
        try:
            gradients = torch.autograd.grad(
                output,
                [leaves[position] for position in wanted],
                torch.ones_like(output),
                retain_graph=True,
                allow_unused=True,
            )
        except DataDependentOutputException as error:
            raise UnsupportedOperatorError(
                f"the derivative of an operator of forward reads values of tensors ({error}), "
                "which are not known before a call; register its backward as an operator with a "
                "fake kernel. A mixture of experts of transformers trains with "
                'model.set_experts_implementation("batched_mm")'
            ) from error
        except Exception as error:
            raise UnsupportedOperatorError(
                f"PyTorch cannot differentiate forward on fake tensors: {first_paragraph(error)}"
            ) from error
        for position, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                _refuse_sparse(rehearsal.inputs[position], gradient)
                reached[position] |= {number}
                layouts.setdefault(position, layout_of(gradient))
    return reached


def _refuse_sparse(described: InputDescriptor, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        name = described.target or described.name
        raise UnsupportedOperatorError(
            f"the gradient of {name} has the layout {gradient.layout}, which compiled code does "
            "not make: leave out sparse=True or sparse_grad=True"
        )
