"""Find the primals that the gradient of each output reaches, with few runs of backward.

A backward on fake tensors takes as long as a forward. The outputs of many models depend on each
other: a loss is computed from logits, BERT's pooled state from its hidden state, and each hidden
state from the one before. Such an output is differentiated up to the next output in its graph,
whose reach is that of its own gradient::

    x -> layers -> hidden -> pooler -> pooled
    pooled: reaches the pooler's weights, and what hidden reaches  (a backward through the pooler)
    hidden: reaches x and the layers' weights                      (a backward through the layers)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
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
    found: dict[int, frozenset[int]] = {}
    graph = _Graph(outputs, {id(leaves[position]): position for position in rehearsal.wanted})
    for number, output in enumerate(outputs):
        seed, through = torch.ones_like(output), frozenset[int]()
        chain: list[tuple[int, frozenset[int]]] = []
        following: int | None = number
        while following is not None:
            if following in found:
                through = found[following]
                break
            current = following
            following, seed, sent = _step(rehearsal, leaves, outputs, graph, current, seed)
            for position, gradient in sent.items():
                _refuse_sparse(rehearsal.inputs[position], gradient)
                layouts.setdefault(position, layout_of(gradient))
            chain.append((current, frozenset(sent)))
        for current, here in reversed(chain):
            through = found[current] = here | through
    return {
        position: frozenset(number for number, sent in found.items() if position in sent)
        for position in rehearsal.wanted
    }


def _step(
    rehearsal: Rehearsal,
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    graph: _Graph,
    number: int,
    seed: torch.Tensor,
) -> tuple[int | None, torch.Tensor, dict[int, torch.Tensor]]:
    """Differentiate an output up to the next output in its graph, if there is one.

    Args:
        seed: the output's own gradient.

    Returns:
        The number of the next output, or None; its gradient, or else ``seed``; and the gradients of
        primals, by position.
    """
    following, asked = graph.way(number)
    if following is not None:
        wanted = [outputs[following], *(leaves[p] for p in asked)]
        first, *gradients = _gradients(outputs[number], wanted, seed)
        if first is not None and first.layout is torch.strided:
            return following, first, _sent(asked, gradients)
        # A custom function behind it makes zeros of an absent gradient, unless it asked for None. A
        # node behind it may refuse a sparse one, or make sparse ones of it.
    asked = rehearsal.wanted
    return None, seed, _sent(asked, _gradients(outputs[number], [leaves[p] for p in asked], seed))


def _sent(
    positions: Sequence[int], gradients: Sequence[torch.Tensor | None]
) -> dict[int, torch.Tensor]:
    return {p: g for p, g in zip(positions, gradients, strict=True) if g is not None}


class _Graph:
    """Autograd's graph behind the outputs.

    Args:
        positions: the position of each wanted primal, by the id of its tensor.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], positions: dict[int, int]) -> None:
        self._positions = positions
        edges = [(output.grad_fn, output.output_nr) for output in outputs]
        # The number of the first output of each edge: a node, and its result's number.
        self._numbers: dict[Any, int] = {}
        for number, edge in enumerate(edges):
            if edge[0] is not None:
                self._numbers.setdefault(edge, number)
        self._nodes = {node for node, _ in self._numbers}
        # By output: the edges up to other outputs, the next outputs, and the wanted primals.
        self._edges = [self._before_others(number, edge) for number, edge in enumerate(edges)]
        self._next = [
            {self._numbers[e] for e in found if self._numbers.get(e, number) != number}
            for number, found in enumerate(self._edges)
        ]
        self._here = [self._primals_of(found) for found in self._edges]
        self._behind: dict[int, frozenset[int]] = {}
        for number in TopologicalSorter(dict(enumerate(self._next))).static_order():
            behind = (self._behind[other] for other in self._next[number])
            self._behind[number] = self._here[number].union(*behind)

    def way(self, number: int) -> tuple[int | None, list[int]]:
        """Return the output up to which output ``number`` is differentiated, and the primals.

        The output is None if its reach may not be a part of the reach of ``number``. That is so if
        another result of the same node is read. It is also so if a path around it leads to a primal
        behind it: a node may treat the sum of two gradients otherwise than each of them.
        """
        others = any(e[0] in self._nodes and e not in self._numbers for e in self._edges[number])
        if len(self._next[number]) != 1 or others:
            return None, []
        (following,) = self._next[number]
        if self._here[number] & self._behind[following]:
            return None, []
        return following, sorted(self._here[number])

    def _before_others(self, number: int, edge: Any) -> dict[Any, None]:
        def following(current: Any) -> list[Any]:
            if self._numbers.get(current, number) != number:
                return []
            return [other for other in current[0].next_functions if other[0] is not None]

        return reached([edge], following) if edge[0] is not None else {}

    def _primals_of(self, edges: Iterable[Any]) -> frozenset[int]:
        variables = [id(getattr(node, "variable", None)) for node, _ in edges]
        return frozenset(self._positions[v] for v in variables if v in self._positions)


def _gradients(
    output: torch.Tensor, tensors: Sequence[torch.Tensor], seed: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of ``tensors``; None for those that ``output`` sends none."""
    try:
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
