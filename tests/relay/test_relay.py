"""The texts of Relay: signature, parameters, constants, versions and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tvmbridge
from tests.relay.running import page_examples
from tvmbridge.cli import main
from tvmbridge.core.errors import CaptureError, ExportError, UnsupportedOperatorError
from tvmbridge.relay.literals import attribute_text, name_text, number_text, type_text
from tvmbridge.relay.registry import CONVERTERS


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(4, 2)})
        self.register_buffer("table", torch.tensor([[0.5, 1.0]]))

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        y = self.inner["a"](x) * 2 + self.table
        return {"y": y, "left": pair[0].relu(), "number": 3, "same": x}


def _small() -> tuple[Small, Any]:
    return Small().eval(), (torch.randn(3, 4), (torch.randn(5), torch.randn(2)))


def test_signature_and_parameters() -> None:
    module, sample = _small()
    text, params = tvmbridge.to_relay(module, sample)
    assert text.startswith('#[version = "0.0.5"]\ndef @main(')
    signature = text.split("@main(")[1].split(") ->")[0]
    declared = re.findall(r"%(\w+): Tensor\[\(([\d, ]*)\), (\w+)\]", signature)
    assert declared == [
        ("x", "3, 4", "float32"),
        ("pair_0", "5", "float32"),
        ("pair_1", "2", "float32"),
        ("inner_a_weight", "2, 4", "float32"),
        ("inner_a_bias", "2", "float32"),
        ("table", "1, 2", "float32"),
    ]
    assert list(params) == ["inner_a_weight", "inner_a_bias", "table"]
    np.testing.assert_array_equal(params["table"], module.table.numpy())
    returned = text.split(") -> ")[1].split(" {")[0]
    shapes = ("3, 2", "5", "3, 4")
    assert returned == f"({', '.join(f'Tensor[({s}), float32]' for s in shapes)})"


def test_the_operators_of_a_module() -> None:
    text, _ = tvmbridge.to_relay(*_small())
    body = [line.strip() for line in text.splitlines()[2:-1]]
    assert body == [
        "%0 = nn.dense(%x, %inner_a_weight, units=2);",
        "%1 = nn.bias_add(%0, %inner_a_bias, axis=1);",
        "%2 = multiply(%1, 2.0f);",
        "%3 = add(%2, %table);",
        "%4 = nn.relu(%pair_0);",
        "(%3, %4, %x)",
    ]


def test_parameters_are_copies_and_the_module_stays() -> None:
    module = nn.Linear(4, 2).eval()
    before = module.weight.detach().clone()
    _, params = tvmbridge.to_relay(module, torch.randn(3, 4))
    params["weight"][:] = 7
    assert torch.equal(module.weight, before)


def test_a_captured_graph_has_the_same_text() -> None:
    module, sample = _small()
    captured = tvmbridge.capture(module, sample, needs_grad=False)
    assert tvmbridge.to_relay(captured).text == tvmbridge.to_relay(module, sample).text


def test_a_dispatched_module_has_the_same_text() -> None:
    module, x = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    text = tvmbridge.to_relay(module, x).text
    tvmbridge.add_tvm_dispatch(module, x)
    assert tvmbridge.to_relay(module, x).text == text


class Places(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(4) * 2.0


def test_values_that_depend_on_no_input_are_parameters() -> None:
    text, params = tvmbridge.to_relay(Places().eval(), torch.zeros(3, 4))
    assert "%0 = add(%x, %const_0);" in text
    np.testing.assert_array_equal(params["const_0"], np.arange(4, dtype=np.float32) * 2)


class Stores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return x + 1


def test_values_that_forward_stores_are_no_results() -> None:
    text, _ = tvmbridge.to_relay(Stores().eval(), torch.zeros(3))
    assert ") -> Tensor[(3), float32] {" in text
    text, _ = tvmbridge.to_relay(nn.GRU(2, 3, bidirectional=True).eval(), torch.zeros(4, 1, 2))
    assert ") -> (Tensor[(4, 1, 6), float32], Tensor[(2, 1, 3), float32]) {" in text


class Unsayable(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.fft.fft(x).abs()
        return torch.lgamma(spectrum), torch.special.i1(x)


def test_an_error_names_all_operators_and_lines() -> None:
    with pytest.raises(ExportError) as caught:
        tvmbridge.to_relay(Unsayable().eval(), torch.randn(3, 4))
    message = str(caught.value)
    for name in ("_fft", "aten.lgamma.default", "aten.special_i1.default"):
        assert name in message
    lines = [line for line in message.splitlines() if "aten." in line]
    assert all("test_relay.py:" in line for line in lines)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.lgamma(x + torch.rand_like(x))


def test_effects_are_named_beside_operators() -> None:
    with pytest.raises(ExportError) as caught:
        tvmbridge.to_relay(Writing().eval(), torch.randn(3))
    for part in ("random draw", "forward writes into calls", "aten.lgamma"):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises((ExportError, UnsupportedOperatorError), match=name):
        tvmbridge.to_relay(Places().eval(), torch.zeros(3, 4, dtype=dtype))


def test_train_mode_is_refused() -> None:
    with pytest.raises(ExportError, match="train mode"):
        tvmbridge.to_relay(nn.Linear(4, 2), torch.zeros(3, 4))


def test_a_forward_that_raises() -> None:
    with pytest.raises(CaptureError):
        tvmbridge.to_relay(nn.Linear(4, 2).eval(), torch.zeros(3, 5))


class Scattered(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.scatter(1, index, 1.0) + x.scatter_add(1, index, x[:, :2])


@pytest.mark.parametrize("version", ["0.17", "0.14", "0.11"])
def test_versions_differ_in_scatter(version: str) -> None:
    sample = (torch.zeros(3, 4), torch.ones(3, 2, dtype=torch.int64))
    text, _ = tvmbridge.to_relay(Scattered().eval(), sample, version=version)
    found = set(re.findall(r"scatter\w*", text))
    assert found == ({"scatter", "scatter_add"} if version == "0.11" else {"scatter_elements"})


def test_an_unknown_version() -> None:
    with pytest.raises(ValueError, match=r"0\.17, 0\.14, 0\.11"):
        tvmbridge.to_relay(Places().eval(), torch.zeros(3, 4), version="0.8")


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1.0, torch.float32, "1.0f"),
        (-1e-05, torch.float32, "-1e-05f"),
        (0.1, torch.float64, "0.1f64"),
        (3, torch.int32, "3"),
        (-3, torch.int64, "-3i64"),
        (1, torch.bool, "True"),
        (float("inf"), torch.float32, None),
        (3, torch.uint8, None),
    ],
)
def test_numbers(value: float, dtype: torch.dtype, text: str | None) -> None:
    assert number_text(value, dtype) == text


def test_types_attributes_and_names() -> None:
    assert type_text((), torch.int64) == "Tensor[(), int64]"
    assert (
        attribute_text([1, [True, 2.5], "NCHW", torch.bool]) == '[1, [True, 2.5f], "NCHW", "bool"]'
    )
    assert name_text("layer.0.weight", ()) == "layer_0_weight"
    assert name_text("0.a", {"v_0_a"}) == "v_0_a_1"


def test_all_results_and_operands_are_variables_or_numbers() -> None:
    """A converter that is given a result which nothing computes must not write its placeholder."""
    text, _ = tvmbridge.to_relay(*_small())
    assert "?" not in text
    assert "None" not in text


class Decomposed(nn.Module):
    """Calls operators without a converter, which PyTorch decomposes."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        f = nn.functional
        activations = [f.gelu(x), f.gelu(x, approximate="tanh"), f.silu(x), f.hardswish(x)]
        activations += [f.hardsigmoid(x), f.hardtanh(x), f.prelu(x, w[:1])]
        norms = [f.rms_norm(x, [4], w), f.rms_norm(x, [4]), f.instance_norm(x)]
        norms += [x.norm(dim=1), torch.linalg.vector_norm(x, 3), x.logsumexp((0, 1))]
        moves = [
            x.roll(1, 1),
            x.select_scatter(x[:, 1], 1, 0),
            x.tril(),
            x.triu(1),
            torch.mv(x[0], w),
        ]
        return [*activations, *norms, *moves, torch.rsub(x, x), torch.baddbmm(x, x[:, :, :3], x)]


def test_operators_that_pytorch_decomposes_are_written() -> None:
    text, _ = tvmbridge.to_relay(Decomposed().eval(), (torch.zeros(2, 3, 4), torch.zeros(4)))
    assert text.count("erf") == text.count("tanh") == 1
    assert "?" not in text


def test_the_converters_are_aten_operators() -> None:
    assert len(CONVERTERS) > 150
    assert all(str(overload).startswith("aten.") for overload in CONVERTERS)


def test_the_page_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(page_examples()[0], "relay.md", "exec"), {})
    assert "nn.conv2d(%input, %v_0_weight" in Path("model.relay").read_text()
    assert set(np.load("model.npz")) == {"v_0_weight", "v_0_bias"}


def test_the_command_writes_text_and_parameters(tmp_path: Path) -> None:
    path = tmp_path / "linear.relay"
    factory = f"{__name__}:linear"
    assert main(["export", factory, "--relay", str(path), "--relay-version", "0.11"]) == 0
    module, x = linear()
    assert path.read_text() == tvmbridge.to_relay(module, x, version="0.11").text
    assert set(np.load(tmp_path / "linear.relay.npz")) == {"weight", "bias"}


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 2).eval(), torch.zeros(3, 4)
