"""The primals that each output's gradient reaches are those of a backward of each output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.differentiation.facts import gradient_facts
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.graph_capture.capture import capture

Forward = Callable[..., Any]


class _BothOrNone(torch.autograd.Function):
    """Returns a gradient only if that of the first result arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x + 1, y + 1

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        return (None, None) if first is None else (first, second)


class _Stops(torch.autograd.Function):
    """Returns no gradient for its second operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent, None


def _chain(m: _Weights, x: Tensor) -> Any:
    first = m.a(x).tanh()
    second = m.b(first).tanh()
    return first, second, m.c(second)


def _shares_a_weight(m: _Weights, x: Tensor) -> Any:
    first = m.a(x).tanh()
    return first, m.b(first) @ m.a.weight


def _around(m: _Weights, x: Tensor) -> Any:
    first = m.a(x).tanh()
    return first, m.b(first) + m.c(x)


def _later_first(m: _Weights, x: Tensor) -> Any:
    first = m.a(x).tanh()
    return m.b(first), first, m.c(first)


def _loss_first(m: _Weights, x: Tensor) -> Any:
    hidden = m.a(x).tanh()
    logits = m.b(hidden)
    return logits.square().sum(), logits, hidden, m.c(hidden)


def _of_two(m: _Weights, x: Tensor) -> Any:
    first, second = m.a(x).tanh(), m.b(x).tanh()
    return first, second, m.c(first * second)


def _another_result(m: _Weights, x: Tensor) -> Any:
    first, second = _BothOrNone.apply(m.a(x), m.b(x))  # type: ignore[no-untyped-call]
    return first, second, first * second, m.c(second)


def _twice(m: _Weights, x: Tensor) -> Any:
    first = m.a(x).tanh()
    return first, first * 1, first + first


def _stopped_before(m: _Weights, x: Tensor) -> Any:
    first = _Stops.apply(m.a(x), m.b(x))  # type: ignore[no-untyped-call]
    return first, m.c(first)


def _stopped_behind(m: _Weights, x: Tensor) -> Any:
    first = m.a(x).tanh()
    return first, _Stops.apply(m.b(x), first)  # type: ignore[no-untyped-call]


def _zeros_behind(m: _Weights, x: Tensor) -> Any:
    first = _Stops.apply(m.a(x), x)  # type: ignore[no-untyped-call]
    _, second = _BothOrNone.apply(first, first)  # type: ignore[no-untyped-call]
    return first, second, m.c(second)


def _parts(m: _Weights, x: Tensor) -> Any:
    first, second = m.a(x).tanh().unbind(0)
    return first, second, m.b(first), m.c(second)


class _Weights(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


CASES = [
    _chain,
    _shares_a_weight,
    _around,
    _later_first,
    _loss_first,
    _of_two,
    _another_result,
    _twice,
    _stopped_before,
    _stopped_behind,
    _zeros_behind,
    _parts,
]


@pytest.mark.parametrize("forward", CASES)
def test_the_reach_is_that_of_a_backward_of_each_output(forward: Forward) -> None:
    module, x = _Weights(forward), torch.randn(2, 4, requires_grad=True)
    rehearsal = Rehearsal(module, (x,), {}, capture(module, x))
    facts = gradient_facts(rehearsal)
    found = dict(zip(facts.wanted, facts.gradient_reads, strict=True))
    originals = dict(zip((d.name for d in rehearsal.inputs), rehearsal.originals, strict=True))
    expected = {
        name: frozenset(n for n, output in enumerate(module(x)) if _reaches(output, tensor))
        for name, tensor in originals.items()
    }
    assert found == {name: reads for name, reads in expected.items() if reads}


def _reaches(output: Tensor, tensor: Tensor) -> bool:
    seed = torch.ones_like(output)
    found = torch.autograd.grad(output, tensor, seed, retain_graph=True, allow_unused=True)
    return found[0] is not None


class _Counts(torch.autograd.Function):
    """Counts the runs of its backward."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        _Counts.runs += 1
        return cotangent


def _counted(m: _Weights, x: Tensor) -> Tensor:
    counted: Tensor = _Counts.apply(m.a(x))  # type: ignore[no-untyped-call]
    return counted


def _chain_counted(m: _Weights, x: Tensor) -> Any:
    first = _counted(m, x)
    second = m.b(first).tanh()
    return first, second, m.c(second)


def _around_counted(m: _Weights, x: Tensor) -> Any:
    first = _counted(m, x)
    return first, m.b(first) + x


def _loss_first_counted(m: _Weights, x: Tensor) -> Any:
    logits = m.b(_counted(m, x))
    return logits.square().sum(), logits, m.c(logits.mean(0))


@pytest.mark.parametrize(
    ("forward", "runs"), [(_chain_counted, 1), (_around_counted, 2), (_loss_first_counted, 1)]
)
def test_a_chain_of_outputs_is_differentiated_once(forward: Forward, runs: int) -> None:
    module, x = _Weights(forward), torch.randn(2, 4, requires_grad=True)
    rehearsal = Rehearsal(module, (x,), {}, capture(module, x))
    _Counts.runs = 0
    gradient_facts(rehearsal)
    assert _Counts.runs == runs


def _transposed_loss(m: _Weights, x: Tensor) -> Any:
    scaled = m.a.weight * 2
    return (scaled.mT.contiguous() * x).sum(), scaled


def test_a_layout_is_that_of_the_gradient_of_the_first_output() -> None:
    module, x = _Weights(_transposed_loss), torch.randn(4, 4)
    rehearsal = Rehearsal(module, (x,), {}, capture(module, x))
    facts = gradient_facts(rehearsal)
    (expected,) = torch.autograd.grad(module(x)[0], module.a.weight)
    assert expected.stride() == (1, 4)
    layout = facts.layouts[facts.wanted.index("p_a_weight")]
    assert layout.order == (1, 0)


def _looked_up(m: _Weights, words: Tensor) -> Any:
    table = m.a.weight * 2
    return table, nn.functional.embedding(words, table, sparse=True)


def test_a_sparse_gradient_of_an_output_is_refused() -> None:
    module, words = _Weights(_looked_up), torch.tensor([1, 2])
    rehearsal = Rehearsal(module, (words,), {}, capture(module, words))
    with pytest.raises(
        UnsupportedOperatorError, match=r"a\.weight has the layout torch.sparse_coo"
    ):
        gradient_facts(rehearsal)
