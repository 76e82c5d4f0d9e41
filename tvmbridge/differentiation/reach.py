"""Find the primals that the gradient of each output reaches, with few runs of backward.

A backward on fake tensors takes as long as a forward. The outputs of many models depend on each
other: BERT's pooled state is computed from its hidden state, and each hidden state from the one
before. Such an output is differentiated up to the output before it, whose reach is known::

    x -> layers -> hidden -> pooler -> pooled
    hidden: reaches x and the layers' weights                      (a backward through the layers)
    pooled: reaches the pooler's weights, and what hidden reaches  (a backward through the pooler)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tvmbridge.calls.layouts import Layout, layout_of
from tvmbridge.core.errors import BridgeError, UnsupportedOperatorError
from tvmbridge.core.reached import reached
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
    found: list[frozenset[int]] = []
    graph = _Graph({id(leaves[position]): position for position in rehearsal.wanted})
    for output in outputs:
        before, asked = graph.add(output)
        through = frozenset[int]()
        gradients: list[torch.Tensor | None] = []
        if before is not None:
            first, *gradients = _gradients(output, [outputs[before], *(leaves[p] for p in asked)])
            if first is not None and first.layout is torch.strided:
                through = found[before]
            else:
                # A custom function behind it makes zeros of an absent gradient, unless it asked
                # for None. A node behind it may refuse a sparse one, or make sparse ones of it.
                before, asked = None, rehearsal.wanted
        if before is None:
            gradients = _gradients(output, [leaves[p] for p in asked])
        sent = {p: g for p, g in zip(asked, gradients, strict=True) if g is not None}
        for position, gradient in sent.items():
            _refuse_sparse(rehearsal.inputs[position], gradient)
            layouts.setdefault(position, layout_of(gradient))
        found.append(frozenset(sent) | through)
    return {
        position: frozenset(number for number, sent in enumerate(found) if position in sent)
        for position in rehearsal.wanted
    }


@dataclass
class _Graph:
    """Autograd's graph behind some outputs.

    - ``positions``: the position of each wanted primal, by the id of its tensor.
    - ``outputs``: the number of each output so far, by its edge: a node, and its output's number.
    - ``nodes``: the nodes of these edges.
    - ``behind``: for each output so far, the wanted primals that its graph has.
    """

    positions: dict[int, int]
    outputs: dict[Any, int] = field(default_factory=dict)
    nodes: set[Any] = field(default_factory=set)
    behind: list[frozenset[int]] = field(default_factory=list)

    def add(self, output: torch.Tensor) -> tuple[int | None, list[int]]:
        """Return the earlier output to which ``output`` is differentiated, and the primals.

        The earlier output is None if its reach may not be a part of the reach of ``output``. That
        is so if ``output`` reads another result of the same node. It is also so if a path around
        the earlier output leads to a primal behind it: a node may treat the sum of two gradients
        otherwise than each of them.
        """
        edge = output.grad_fn, output.output_nr
        edges = reached([edge], self._following) if edge[0] is not None else {edge: None}
        earlier = {self.outputs[edge] for edge in edges if edge in self.outputs}
        variables = [id(getattr(node, "variable", None)) for node, _ in edges]
        here = frozenset(self.positions[v] for v in variables if v in self.positions)
        others = any(e[0] in self.nodes and e not in self.outputs for e in edges)
        beyond = frozenset[int]().union(*(self.behind[number] for number in earlier))
        if edge[0] is not None and edge not in self.outputs:
            self.outputs[edge] = len(self.behind)
            self.nodes.add(edge[0])
        self.behind.append(here | beyond)
        if len(earlier) != 1 or others or here & beyond:
            return None, list(self.positions.values())
        return next(iter(earlier)), sorted(here)

    def _following(self, edge: Any) -> list[Any]:
        if edge in self.outputs:
            return []
        return [other for other in edge[0].next_functions if other[0] is not None]


def _gradients(output: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of ``tensors``; None for those that ``output`` sends none."""
    try:
        seed = torch.ones_like(output)
        found = torch.autograd.grad(output, tensors, seed, retain_graph=True, allow_unused=True)
    except DataDependentOutputException as error:
        raise UnsupportedOperatorError(
            f"the derivative of an operator of forward reads values of tensors ({error}), "
            "which are not known before a call; register its backward as an operator with a "
            "fake kernel"
        ) from error
    except BridgeError:
        raise
    except Exception as error:
        raise UnsupportedOperatorError(
            f"PyTorch cannot differentiate forward on fake tensors: {first_paragraph(error)}"
        ) from error
    return list(found)


def _refuse_sparse(described: InputDescriptor, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        name = described.target or described.name
        raise UnsupportedOperatorError(
            f"the gradient of {name} has the layout {gradient.layout}, which compiled code does "
            "not make: leave out sparse=True or sparse_grad=True"
        )
