"""Symbols that forward relates: by a constant offset, a multiple, or a divisor of sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.frontend.helpers import Function
from tvmbridge.graph_capture.any_size import shapes_of, traced_with_symbols
from tvmbridge.symbolic.related import divided, related
from tvmbridge.symbolic.symbols import LinearSize, Symbols


class Grows(nn.Module):
    """A module whose mask must be one longer than its cache."""

    def forward(self, cache: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([cache, cache[:1]]) + mask


class Halves(nn.Module):
    """A module that needs an even last dimension: it pools by two, repeats, and adds."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pooled = functional.avg_pool1d(x, 2).repeat_interleave(2, -1)
        return (x + pooled).sum() + y.sum()


class Patches(nn.Module):
    """A module that cuts its input into patches of four."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.conv1d(x, x.new_ones(1, 3, 4), stride=4) * y.mean()


def _forms(
    first: tuple[int, int], scale: int, other: LinearSize | None = None
) -> dict[tuple[int, int], LinearSize]:
    return {first: LinearSize(scale), (1, 0): other or LinearSize()}


@pytest.mark.parametrize(
    ("module", "shapes", "calls", "expected"),
    [
        (
            Grows(),
            [(9,), (10,)],
            [(9, 10), (14, 15)],
            {(0, 0): LinearSize(), (1, 0): LinearSize(1, 1)},
        ),
        (
            Halves(),
            [(1, 3, 24), (8,)],
            [(24, 8), (36, 12)],
            {(0, 2): LinearSize(2), (1, 0): LinearSize()},
        ),
        (
            Patches(),
            [(1, 3, 24), (8,)],
            [(24, 8), (48, 12)],
            {(0, 2): LinearSize(4), (1, 0): LinearSize()},
        ),
    ],
)
def test_forms_are_those_that_forward_demands(
    module: nn.Module,
    shapes: list[tuple[int, ...]],
    calls: list[tuple[int, int]],
    expected: dict[tuple[int, int], LinearSize],
) -> None:
    sample = tuple(map(torch.randn, shapes)), dict[str, torch.Tensor]()
    symbols = Symbols(tuple((d,) for d in expected))
    trace = traced_with_symbols(module, *sample, list(expected), needs_grad=False)
    found = related(symbols, trace.relations, sample, calls)
    if isinstance(module, Patches):
        assert set(found.forms.values()) == {LinearSize()}
        units = divided(found, trace, sample, calls)
        assert units is not None
        found = units
    assert found.forms == expected
    for symbol in (3, 7):
        probe = found.probe(*sample, (symbol,) * len(found.dimensions))
        assert trace.relations.broken(shapes_of(probe)) is None
        assert set(found.sizes(probe[0]) or ()) == {symbol}


class Loss(nn.Module):
    """A module that demands as many labels as tokens, in all rows together."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return tokens.flatten() - labels.flatten()


class Texts(nn.Module):
    """A module with two texts for each row, of any lengths."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one.mean(1) + other.mean(1)


@pytest.mark.parametrize(("module", "symbols"), [(Loss(), 2), (Texts(), 3)])
def test_sizes_that_are_equal_in_calls_are_one_symbol_if_forward_relates_products(
    module: nn.Module, symbols: int
) -> None:
    sample = (torch.randn(3, 35), torch.randn(3, 35)), dict[str, torch.Tensor]()
    chosen = Symbols((((0, 0), (1, 0)), ((0, 1),), ((1, 1),)), equal=(0, 1, 1))
    dimensions = [d for group in chosen.dimensions for d in group]
    trace = traced_with_symbols(module, *sample, dimensions, needs_grad=False)
    found = related(chosen, trace.relations, sample, [(3, 35, 35), (3, 115, 115)])
    assert len(found.dimensions) == symbols


@pytest.mark.parametrize(
    ("forward", "sizes", "size"),
    [
        (lambda a, b, c: torch.cat([a, b]) * c, (7, 9, 16), lambda a, b: a + b),
        (lambda a, b, c: (a[:, None] * b).flatten() * c, (7, 9, 63), lambda a, b: a * b),
        (lambda a, b, c: a.sum() + b[::2] * c, (7, 9, 5), lambda a, b: (b + 1) // 2),
    ],
)
def test_a_size_that_follows_from_several_symbols_is_derived(
    forward: Any, sizes: tuple[int, ...], size: Any
) -> None:
    sample = tuple(map(torch.randn, sizes)), dict[str, torch.Tensor]()
    chosen = Symbols((((0, 0),), ((1, 0),), ((2, 0),)))
    trace = traced_with_symbols(Function(forward), *sample, chosen.all_dimensions, needs_grad=False)
    found = related(chosen, trace.relations, sample, [sizes])
    assert found.dimensions == (((0, 0),), ((1, 0),))
    probe = found.probe(*sample, (31, 53))
    assert probe[0][2].shape == (size(31, 53),)
    assert trace.relations.broken(shapes_of(probe)) is None
    assert found.sizes(probe[0]) == (31, 53)
    assert found.sizes((*probe[0][:2], torch.empty(size(31, 53) + 1))) is None
    other = found.without([None, 11])
    assert other.probe(*found.probe(*sample, (5, 11)), (31,))[0][2].shape == (size(31, 11),)
