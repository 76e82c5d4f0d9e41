"""Sizes declared by ``torch.export.Dim`` are symbolic from the first call, within their bounds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime import family
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.symbolic.declared import declared, names_no_size


class Scaled(nn.Module):
    """A layer and a norm over a last dimension of size six, times an optional tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x).tanh())
        return y if scale is None else y * scale


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each compilation appends the name of the class that compiles."""
    found: list[str] = []
    for owner, method in ((family.Family, "_compile"), (Compiler, "entry")):
        genuine = getattr(owner, method)

        def counted(*given: Any, _genuine: Any = genuine, _name: str = owner.__name__) -> Any:
            found.append(_name)
            return _genuine(*given)

        monkeypatch.setattr(owner, method, counted)
    return found


def _fallbacks(module: nn.Module, *calls: tuple[int, ...]) -> dict[str, str]:
    """Make calls with these shapes, compare with eager PyTorch, and return reasons of fallbacks."""
    reference = copy.deepcopy(module)
    del reference.__dict__["forward"]
    with torch.no_grad():
        for shape in calls:
            x = torch.randn(shape)
            torch.testing.assert_close(module(x), reference(x), rtol=1e-5, atol=1e-6)
    report = dispatch_report(module)
    assert report.tvm_calls + sum(report.fallbacks.values()) == len(calls)
    return {reason: report.examples[reason] for reason in report.fallbacks}


def test_a_named_dimension_is_a_symbol_at_once(compilations: list[str]) -> None:
    module = Scaled().eval()
    spec = {"x": {0: Dim("batch", min=2, max=100)}}
    add_tvm_dispatch(module, torch.randn(4, 6), dynamic_shapes=spec, on_fallback="silent")
    assert _fallbacks(module, (4, 6), (7, 6), (2, 6), (100, 6)) == {}
    assert compilations[0] == "Family"
    assert "Compiler" not in compilations
    module(torch.randn(101, 6))
    (reason,) = dispatch_report(module).fallbacks
    assert dispatch_report(module).examples[reason] == (
        "argument `x`: dimension 0: it is 101, and batch is from 2 to 100"
    )
    module(torch.randn(1, 6))
    assert dispatch_report(module).fallbacks == {reason: 2}


def test_without_a_sample_the_first_call_is_compiled_with_symbols(compilations: list[str]) -> None:
    module = Scaled().eval()
    add_tvm_dispatch(module, dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.AUTO},))
    assert _fallbacks(module, (4, 5, 6), (9, 11, 6), (4, 5, 6)) == {}
    assert compilations == ["Family"]


def test_static_dimensions_are_static() -> None:
    module = Scaled().eval()
    spec = {"x": (Dim("batch"), Dim.STATIC, 6)}
    add_tvm_dispatch(module, torch.randn(4, 5, 6), dynamic_shapes=spec, on_fallback="silent")
    told = _fallbacks(module, (8, 5, 6), (8, 7, 6))
    assert told == {
        "the shape of an input differs": "argument `x`: shape (8, 7, 6), compiled for (4, 5, 6)"
    }


def test_hints_are_static_where_forward_demands_it_and_dims_are_refused() -> None:
    hinted, named = Scaled().eval(), Scaled().eval()
    add_tvm_dispatch(hinted, torch.randn(4, 6), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert _fallbacks(hinted, (4, 6), (9, 6)) == {}
    for demanded in (Dim("width"), Dim.DYNAMIC):
        with pytest.raises(RuntimeError, match="forward demands size 6 of dimension 1 of argument"):
            add_tvm_dispatch(named, torch.randn(4, 6), dynamic_shapes=({1: demanded},))
        assert "forward" not in named.__dict__


def test_hints_of_one_size_are_symbols_of_their_own_once_a_call_tells_them_apart() -> None:
    module = Scaled().eval()
    add_tvm_dispatch(module, dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert _fallbacks(module, (12, 12, 6), (15, 20, 6), (12, 12, 6), (9, 9, 6)) == {}


@pytest.mark.slow
def test_gradients_and_copies() -> None:
    module = Scaled().train()
    reference = copy.deepcopy(module)
    spec = {"x": {0: Dim("batch")}, "scale": {0: Dim("batch")}}
    add_tvm_dispatch(module, (torch.randn(4, 6), torch.randn(4, 6)), dynamic_shapes=spec)
    twin = copy.deepcopy(module)
    for rows in (8, 5):
        x, scale = torch.randn(rows, 6), torch.randn(rows, 6)
        gradients = [
            torch.autograd.grad(m(x, scale).square().sum(), list(m.parameters()))
            for m in (module, twin, reference)
        ]
        torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-4, atol=1e-5)
    assert [dispatch_report(m).fallbacks for m in (module, twin)] == [{}, {}]


class Pairs(nn.Module):
    """Sums pairs of elements, appends one result, and multiplies by a mask of that length."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pairs = x.view(x.shape[0] // 2, 2).sum(1)
        return torch.cat([pairs, pairs[:1]]).softmax(0) * mask


def test_a_dim_made_of_another_is_an_expression_of_it(compilations: list[str]) -> None:
    half = Dim("half", max=60)
    module = Pairs().eval()
    add_tvm_dispatch(module, dynamic_shapes=({0: 2 * half}, {0: half + 1}), on_fallback="silent")
    for n in (9, 20, 2, 60, 1):
        x, mask = torch.randn(2 * n), torch.rand(n + 1)
        torch.testing.assert_close(module(x, mask), Pairs()(x, mask))
    assert dispatch_report(module).fallbacks == {}
    # One compilation for all sizes, one and two among them.
    assert compilations == ["Family"]
    for x, mask in ((torch.randn(122), torch.rand(62)), (torch.randn(8), torch.rand(1))):
        module(x, mask)
    assert sorted(dispatch_report(module).examples.values()) == [
        "`x`[0], `mask`[0]",
        "argument `x`: dimension 0: it is 122, for which half is 61, and half is from 0 to 60",
    ]


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no parameter": ({"y": None}, RuntimeError, "top-level keys must be the arg names"),
    "no dimension": ({"x": {0: "batch"}}, RuntimeError, "Unexpected dimension mapped to index 0"),
    "too many": (({0: Dim("a")}, None), RuntimeError, "Detected mismatch between the structure"),
    "two bounds": (
        ({0: Dim("a", max=9), 1: Dim("a", max=8)},),
        RuntimeError,
        "Found different definitions",
    ),
    "another rank": (({2: Dim.AUTO},), ValueError, "which has 2 dimensions"),
    "another size": (({0: 5},), ValueError, "says that dimension 0 .* is 5, and it is 4"),
    "no spec": (5, ValueError, "a spec as of torch.export"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_specs_are_refused(name: str) -> None:
    spec, error, text = BAD[name]
    module = Scaled().eval()
    with pytest.raises(error, match=text):
        add_tvm_dispatch(module, torch.randn(4, 6), dynamic_shapes=spec)
    assert "forward" not in module.__dict__


def test_a_spec_that_does_not_fit_a_call_is_counted() -> None:
    module = Scaled().eval()
    add_tvm_dispatch(module, dynamic_shapes={"x": {0: Dim.AUTO}}, on_fallback="silent")
    with torch.no_grad():
        module(torch.randn(4, 6), torch.randn(4, 6))
        module(torch.randn(4, 6))
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert report.fallbacks == {"dynamic_shapes does not fit the arguments": 1}


def test_collections_of_torch_export_name_tensors_of_the_sample() -> None:
    module, x = Scaled().eval(), torch.randn(4, 6)
    shapes = torch.export.ShapesCollection()
    shapes[x] = {0: Dim("batch")}
    with pytest.raises(ValueError, match="needs a sample"):
        add_tvm_dispatch(module, dynamic_shapes=shapes)
    add_tvm_dispatch(module, x, dynamic_shapes=shapes)
    assert _fallbacks(module, (4, 6), (9, 6)) == {}
    with pytest.raises(ValueError, match="another dynamic_shapes"):
        add_tvm_dispatch(module, x, dynamic_shapes={"x": {0: Dim("rows")}})


def test_a_spec_without_symbols_is_none(compilations: list[str]) -> None:
    module = Scaled().eval()
    assert names_no_size(({0: Dim.STATIC, 1: 6}, None))
    add_tvm_dispatch(module, torch.randn(4, 6), dynamic_shapes={"x": None}, on_fallback="silent")
    assert compilations == ["Compiler"]
    assert list(_fallbacks(module, (4, 6), (5, 6))) == ["the shape of an input differs"]


def test_one_tensor_given_twice_has_dimensions_of_its_own() -> None:
    x = torch.randn(4, 4)
    found = declared(({0: Dim("a")}, {-1: Dim("b")}), lambda x, y: x, (x, x), {})
    assert {place: dim.name for place, dim in found.items()} == {(0, 0): "a", (1, 1): "b"}
