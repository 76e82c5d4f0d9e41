"""Prepared composite operators do not change decomposed programs, nor PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._C import DispatchKey
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import ExportedProgram, exported_program

from tests.thinned import thinned
from tvmbridge.graph_capture.trace.composites import composites_prepared_for
from tvmbridge.graph_capture.trace.decompositions import decomposition_table

aten = torch.ops.aten
COMPOSITES = (aten.linear.default, aten.conv2d.default, aten.scaled_dot_product_attention.default)

_DEVICES = "tvmbridge.graph_capture.trace.composites._devices"


class Composed(nn.Module):
    """Operators that decomposition keeps, decomposes, or turns into views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.pairs = nn.Bilinear(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.pairs(y, y).reshape(-1).tile(2)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tvmbridge_test_composites.twice(x)


def exported(device: str = "cpu") -> ExportedProgram:
    module, x = Composed().to(device), torch.randn(2, 3, 8, device=device)
    return torch.export.export(module, (x,), strict=False)


@pytest.mark.parametrize(("device", "differentiated"), thinned([("cpu", True), ("meta", False)], 2))
def test_the_graph_is_the_same(device: str, differentiated: bool) -> None:
    program = exported(device)
    table = decomposition_table(differentiated=differentiated)
    expected = program.run_decompositions(dict(table))
    for _ in range(2):  # the second installs the kernels that the first has created
        with composites_prepared_for(program):
            found = program.run_decompositions(table)
        assert str(found.graph) == str(expected.graph)
        assert str(found.graph_signature) == str(expected.graph_signature)


def test_operators_are_left_as_they_were() -> None:
    program = exported()
    before = [dict(op.py_kernels) for op in COMPOSITES]
    fakes = dict(op_implementations_dict)
    for _ in range(2):
        with composites_prepared_for(program):
            program.run_decompositions()
        assert [dict(op.py_kernels) for op in COMPOSITES] == before
        assert op_implementations_dict == fakes


def test_kernels_are_created_once_for_equal_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported()
    created: list[int] = []
    genuine = exported_program.autograd_not_implemented

    def counted(*args: Any, **kwargs: Any) -> Any:
        created.append(1)
        return genuine(*args, **kwargs)

    monkeypatch.setattr(exported_program, "autograd_not_implemented", counted)

    def created_for(table: dict[Any, Any]) -> bool:
        created.clear()
        with composites_prepared_for(program):
            program.run_decompositions(table)
        return bool(created)

    def linear(*_: Any) -> Any:
        return NotImplemented

    assert created_for({aten.linear.default: linear})
    assert not created_for({aten.linear.default: linear})
    assert created_for({aten.linear.default: lambda *_: NotImplemented})
    assert not created_for({aten.linear.default: linear})
    with monkeypatch.context() as patch:
        patch.setitem(aten.linear.default.py_kernels, DispatchKey.AutogradMeta, linear)
        assert created_for({aten.linear.default: linear})


def kernels_within(program: ExportedProgram) -> set[DispatchKey]:
    """Return the dispatch keys of linear's Python kernels during a decomposition."""
    found = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        found.append(set(aten.linear.default.py_kernels))
        return NotImplemented

    with composites_prepared_for(program):
        program.run_decompositions({aten.linear.default: linear})
    return found[0]


def test_devices_without_values_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported()
    here, elsewhere = DispatchKey.AutogradCPU, DispatchKey.AutogradMPS
    assert here in kernels_within(program)
    assert elsewhere not in kernels_within(program)
    monkeypatch.setattr(_DEVICES, lambda _: {"cpu", "mps"})
    assert elsewhere in kernels_within(program)
    monkeypatch.setattr(_DEVICES, lambda _: {"somebody's own"})
    assert {elsewhere, DispatchKey.AutogradPrivateUse1} <= kernels_within(program)


def test_an_operator_registered_since_is_found() -> None:
    program = exported()
    library = torch.library.Library("tvmbridge_test_composites", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        twice = torch.export.export(Twice(), (torch.ones(2),), strict=False)
        with composites_prepared_for(program):
            graph = twice.run_decompositions({}).graph
        assert "tvmbridge_test_composites.twice" in str(graph)
    finally:
        library._destroy()
