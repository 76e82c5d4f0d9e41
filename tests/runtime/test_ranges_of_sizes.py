"""How often code is compiled for sizes that the code so far does not serve."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.random_sizes.compilations import counted
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.background import UnderWayError
from tvmbridge.runtime.family import Family, OtherSizesError
from tvmbridge.runtime.sized_code import raised
from tvmbridge.symbolic.code import SymbolicCode
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.size import Point


class _Related:
    """Symbols whose values in a call are the call's leaves."""

    def sizes(self, leaves: Point) -> Point:
        return leaves

    def distinct(self, point: Point) -> Point:
        return point


class _Counted(Family):
    """A shape class whose code is for sizes from ``least`` to the largest that calls had.

    - ``compiled``: the bounds of the compilations.
    - ``waits``: whether the next compilation does not end at its call.
    """

    def __init__(self, least: int) -> None:
        compiler: Any = SimpleNamespace(module=torch.nn.Identity(), background=self)
        symbols: Any = _Related()
        super().__init__(compiler, None, symbols, [(5, 8)], list)  # type: ignore[arg-type]
        self.least, self.waits = least, False
        self.compiled: list[tuple[Point, ...]] = []

    def run(self, what: str, about: object, key: Any, body: Any, sample: object) -> SymbolicCode:
        """Return code for the bounds of a compilation, as the background does."""
        if self.waits:
            raise UnderWayError
        *_, bounds = body.args
        self.compiled.append(bounds)
        first = max(self.least, bounds[0][0])
        points = Points((first, bounds[0][1]), bounds[-1], (23, 19))
        trace: Any = SimpleNamespace(relations=SimpleNamespace(broken=lambda sizes: None))
        return SymbolicCode(points, trace, *[None] * 2)  # type: ignore[arg-type]

    def _instantiated(self, *given: Any) -> Any:
        return given

    def serves(self, *point: int) -> bool:
        """Make a call of these sizes, and return whether there is code for it."""
        matched: Any = SimpleNamespace(leaves=point, arguments=((), {}))
        mode: Any = "eval"
        if min(point) == 1:
            return self._entry_of_ones(mode, matched) is not None
        try:
            self.entry(mode, matched)
        except OtherSizesError:
            return False
        return True


@pytest.mark.parametrize(("least", "served"), [(3, False), (2, True)])
def test_small_sizes_that_no_code_serves_compile_once(least: int, served: bool) -> None:
    family = _Counted(least)
    assert family.serves(5, 8)
    for point in ((2, 8), (2, 7), (2, 8), (2, 6)):
        assert family.serves(*point) is served
    assert [bounds[0] for bounds in family.compiled] == [(5, 8), (2, 2)]


def test_calls_with_sizes_of_one_compile_once_and_limit_no_other_calls() -> None:
    family = _Counted(2)
    assert family.serves(5, 8)
    for _ in range(3):
        assert not family.serves(1, 7)
    assert len(family.compiled) == 2
    assert not family.serves(1, 900)
    assert family.serves(2, 900)
    assert family.serves(6, 900)


def test_sizes_that_come_while_code_is_compiled_have_code_later() -> None:
    family = _Counted(2)
    assert family.serves(5, 8)
    family.waits = True
    with pytest.raises(UnderWayError):
        family.serves(5, 80)
    family.waits = False
    assert not family.serves(5, 800)
    assert family.serves(5, 800)


@pytest.mark.parametrize(
    ("sampled", "least", "beyond"),
    [
        ((2, 16, 16), (2, 24, 16), (5, 16, 16)),  # forward permits 16, and no call had 16 and 16
        ((2, 2, 16), (3, 6, 40), (5, 7, 16)),
        ((3, 11, 17), (7, 30, 40), (7, 30, 40)),
    ],
)
def test_code_that_differs_at_sizes_of_two_begins_at_the_smallest_others(
    sampled: Point, least: Point, beyond: Point
) -> None:
    assert raised(sampled, least, (8, 56, 56)) == [beyond, (8, 56, 56)]


class _Branches(torch.nn.Module):
    """Computes something else for sequences of more than 20 positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1 if x.shape[1] > 20 else x.abs() - x


def test_each_side_of_a_branch_by_a_size_has_code_for_any_size() -> None:
    module = _Branches().eval()
    add_tvm_dispatch(module, dynamic_shapes="auto")
    # Rows of fewer elements than a vector of AVX-512 have code of their own on such a processor.
    sizes = [(4, 30), (5, 31), (9, 18), (5, 17), (2, 57), (4, 16), (3, 18), (7, 19), (8, 17)]
    with counted() as compilations, torch.no_grad():
        for rows, length in sizes:
            x = torch.randn(rows, length)
            torch.testing.assert_close(module(x), _Branches()(x), rtol=0, atol=0)
    assert dispatch_report(module).tvm_calls == len(sizes)
    # On each side, one for the first sizes and one for all others.
    assert compilations.done == 4
    assert not compilations.failed


class _Positions(torch.nn.Module):
    """Adds rows of a table of 40 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Buffer(torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() + self.table[: x.shape[1]]


def test_code_serves_the_largest_size_that_forward_permits() -> None:
    module = _Positions().eval()
    expected = copy.deepcopy(module).double()
    add_tvm_dispatch(module, dynamic_shapes="auto")
    with counted() as compilations, torch.no_grad():
        for length in (37, 32, 39, 40, 38, 3):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(module(x), expected(x.double()).float())
    assert dispatch_report(module).tvm_calls == 6
    assert compilations.done == 2
