"""How often code for any size is compiled, and at which sizes it is tried."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from tests.frontend.helpers import Function
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.partial_backwards import PartialBackwards
from tvmbridge.core.errors import BuildError
from tvmbridge.runtime import family, sized_code
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.symbolic.sizes import DifferentCodeError


def _assert_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_calls_of_code_that_gave_way_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_MOST_INSTANCES", 2)
    module = nn.Linear(4, 2).eval()
    add_tvm_dispatch(module, torch.randn(3, 5, 4), dynamic_shapes="auto")
    # When a second dimension changes, code for both replaces the code for the first alone.
    shapes = [(3, 5), (6, 5), (6, 5), (8, 5), (9, 5), (9, 7), (6, 5), (6, 5)]
    for shape in shapes:
        module(torch.randn(*shape, 4))
    report = dispatch_report(module)
    assert report.tvm_calls == len(shapes), report.fallbacks
    assert sum(s.calls for s in report.specializations) < len(shapes)


class TwoResults(nn.Module):
    """Returns log probabilities and a loss of them; backward starts from only one of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x).log_softmax(-1)
        return logits, logits.square().mean()


def test_an_epoch_and_an_evaluation_ask_for_three_compilations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    for owner, method in (
        (family.Family, "_compile"),
        (Compiler, "entry"),
        (PartialBackwards, "_compile"),
    ):
        genuine = getattr(owner, method)

        def counted(*given: Any, _genuine: Any = genuine, _name: str = owner.__name__) -> Any:
            compiled.append(_name)
            return _genuine(*given)

        monkeypatch.setattr(owner, method, counted)
    module = TwoResults().train()
    reference = copy.deepcopy(module).double()
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="raise")
    for rows in (8, 5, 8, 8, 8, 8, 7):
        x = torch.randn(rows, 4)
        module(x)[1].backward()
        reference(x.double())[1].backward()
    _assert_same(
        [p.grad for p in module.parameters()],  # type: ignore[misc]
        [p.grad for p in reference.parameters()],  # type: ignore[misc]
    )
    module.eval()
    with torch.no_grad():
        for rows in (8, 6, 8):  # 8 is the sample's size
            x = torch.randn(rows, 4)
            _assert_same(module(x), reference(x.double()))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.linear.weight.mul_(2)
        x = torch.randn(8, 4)
        expected = functional.linear(x, twin.linear.weight, twin.linear.bias).log_softmax(-1)
        torch.testing.assert_close(twin(x)[0], expected)
    assert compiled == ["Compiler", "Family", "Family"]


def test_code_that_differs_is_compiled_at_other_points(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, tried = sized_code.compile_symbolic, list[Any]()

    @functools.wraps(compile_)
    def refused_once(module: nn.Module, sample_at: Any, points: Any, **options: Any) -> Any:
        tried.append(points)
        if len(tried) == 1:
            raise DifferentCodeError("a list has [4, 4, 3] elements")
        return compile_(module, sample_at, points, **options)

    monkeypatch.setattr(sized_code, "compile_symbolic", refused_once)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(-1))
    reference = copy.deepcopy(module).double()
    add_tvm_dispatch(module, torch.randn(8, 6), dynamic_shapes="auto")
    for rows in (8, 9):
        x = torch.randn(rows, 6)
        _assert_same([module(x)], [reference(x.double())])
    assert dispatch_report(module).tvm_calls == 2
    first, second = ({n for point in points.all for n in point} for points in tried)
    assert first.isdisjoint(second)


def test_a_part_whose_numbers_are_no_sizes_is_refused() -> None:
    irregular = Function(lambda x: x.sin()[x.sin() > 0][: x.shape[0] ** 3 % 17 + 1]).eval()
    with pytest.raises(BuildError, match=r"module.eager.*is \("):
        add_tvm_dispatch(irregular, torch.randn(20, 4), dynamic_shapes=(({0: Dim("rows")},),))


class TimesColumns(nn.Module):
    """Multiplies by the number of columns, as a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * torch.tensor(x.shape[1])


def test_a_tensor_that_forward_makes_of_a_size_is_named() -> None:
    module = TimesColumns().eval()
    add_tvm_dispatch(module, dynamic_shapes="auto")
    for columns in (9, 12, 15, 10, 11):
        x = torch.randn(2, columns)
        _assert_same([module(x)], [x.double().tanh() * columns])
    (reason,) = dispatch_report(module).fallbacks
    assert "at other sizes forward makes a tensor of other numbers at test_any_size.py:" in reason
    assert "torch.tensor(x.shape[1])" in reason
