"""Constants that forward creates on the CPU become constants on the device, with equal values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx

from tvmbridge.graph_capture.capture import capture
from tvmbridge.graph_capture.host_constants import device_of, move_in_module, move_in_program


class Buckets(nn.Module):
    """Computes truncated logarithms of positions, as T5 does, and a scale that is a CPU tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0])
        far = torch.log(places.float() / 3 + 1) / torch.log(torch.tensor(7.0))
        index = (far * 5).to(torch.int64).clamp(max=x.shape[0] - 1)
        return x[index] / torch.sqrt(torch.tensor(x.shape[-1]))


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3) * torch.ones(3)


class Returned(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(4) * 2
        return x + places, places


def _program(module: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(module, (x,)).run_decompositions({})


def _left(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def test_what_depends_on_no_input_is_a_constant() -> None:
    x = torch.randn(11, 5)
    program = _program(Buckets(), x)
    move_in_program(program, torch.device("cpu"))
    assert _left(program) == ["aten.index.Tensor", "aten.div.Tensor"]
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    assert kinds == [InputKind.CONSTANT_TENSOR] * 2 + [InputKind.USER_INPUT]
    program.graph.lint()
    torch.testing.assert_close(program.module()(x), Buckets()(x), rtol=0.0, atol=0.0)


def test_a_graph_that_holds_its_constants() -> None:
    x = torch.randn(11, 5)
    traced = make_fx(Buckets(), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    move_in_module(traced, torch.device("cpu"))
    left = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    assert left == ["aten.index.Tensor", "aten.div.Tensor"]
    traced.graph.lint()
    torch.testing.assert_close(traced(x), Buckets()(x), rtol=0.0, atol=0.0)


class Unread(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.tensor(2.0)
        return x + 1 if y is not None else y


def test_a_constant_that_nothing_reads_is_dropped() -> None:
    program = _program(Unread(), torch.randn(3))
    move_in_program(program, torch.device("cpu"))
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    assert kinds == [InputKind.USER_INPUT]
    assert len(program.graph.find_nodes(op="placeholder")) == 1


def test_draws_stay() -> None:
    program = _program(Draws(), torch.randn(3))
    move_in_program(program, torch.device("cpu"))
    assert "aten.rand.default" in _left(program)
    assert "aten.full.default" not in _left(program)


def test_what_is_returned_stays() -> None:
    program = _program(Returned(), torch.randn(4))
    move_in_program(program, torch.device("cpu"))
    assert _left(program) == ["aten.arange.default", "aten.mul.Tensor", "aten.add.Tensor"]


class Moved(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = torch.tensor(3).to(x.device)
        return x * width, width


def test_what_is_returned_on_the_device_is_a_copy_of_a_constant() -> None:
    program = _program(Moved(), torch.randn(4, device="meta"))
    move_in_program(program, torch.device("meta"))
    assert _left(program) == ["aten.clone.default", "aten.mul.Tensor"]
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    assert kinds == [InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT]
    program.graph.lint()


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), ("meta", "meta")])
def test_the_device_is_that_of_arguments_and_parameters(device: str, expected: str) -> None:
    module = nn.Linear(3, 3, device=device)
    program = torch.export.export(module, (torch.randn(2, 3, device=device),))
    assert device_of(program) == torch.device(expected)


class Mask(nn.Module):
    def forward(self) -> torch.Tensor:
        places = torch.arange(4, device="meta")
        width = torch.tensor(3).to("meta")
        return (places[None] <= places[:, None]) & (places < width)


def test_a_program_without_inputs_is_on_the_device_of_what_it_creates() -> None:
    program = torch.export.export(Mask(), ()).run_decompositions({})
    assert device_of(program) == torch.device("meta")
    move_in_program(program, torch.device("meta"))
    program.graph.lint()
    assert program.graph.find_nodes(op="placeholder")
    assert capture(Mask(), ()).device == torch.device("meta")
