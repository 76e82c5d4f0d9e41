"""Settings of PyTorch's kernels: each setting is read correctly, and compiled code follows it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import tvmbridge
from tvmbridge.core import kernel_settings
from tvmbridge.core.kernel_settings import precisions, put_precisions, reduced_precisions
from tvmbridge.kernels import table

BACKENDS = torch.backends


def _set(owner: object, value: str) -> Callable[[], None]:
    return lambda: setattr(owner, "fp32_precision", value)


CHANGES: dict[str, Callable[[], None]] = {
    "all tf32": _set(BACKENDS, "tf32"),
    "all ieee": _set(BACKENDS, "ieee"),
    "CUDA's products": _set(BACKENDS.cuda.matmul, "tf32"),
    "CUDA's products ieee": _set(BACKENDS.cuda.matmul, "ieee"),
    "cuDNN": _set(BACKENDS.cudnn, "ieee"),
    "cuDNN's convolutions": _set(BACKENDS.cudnn.conv, "ieee"),
    "cuDNN's recurrent layers": _set(BACKENDS.cudnn.rnn, "ieee"),
    "oneDNN": _set(BACKENDS.mkldnn, "ieee"),
    "oneDNN's products": _set(BACKENDS.mkldnn.matmul, "bf16"),
    "oneDNN's convolutions": _set(BACKENDS.mkldnn.conv, "bf16"),
    "oneDNN's recurrent layers": _set(BACKENDS.mkldnn.rnn, "bf16"),
    "the older name": lambda: torch.set_float32_matmul_precision("medium"),
    "the older flag": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "cuDNN's older flag": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "cuDNN's benchmarks": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
    "oneDNN's determinism": lambda: setattr(BACKENDS.mkldnn, "deterministic", True),
    "half precision": lambda: setattr(
        BACKENDS.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before, older = precisions(), torch.get_float32_matmul_precision()
    yield
    BACKENDS.cudnn.benchmark = BACKENDS.mkldnn.deterministic = False
    BACKENDS.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    for backend in (BACKENDS, BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul, BACKENDS.mkldnn):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision(older)
    put_precisions(before)
    assert precisions() == before


# The default precision of products is IEEE already.
UNCHANGED = ("CUDA's products ieee", "oneDNN")


@pytest.mark.parametrize("name", [n for n in CHANGES if n not in UNCHANGED])
def test_each_setting_is_in_keys_and_tables(name: str) -> None:
    before = kernel_settings.kernel_settings(), table.surroundings()
    CHANGES[name]()
    after = kernel_settings.kernel_settings(), table.surroundings()
    if name in ("all ieee", "cuDNN") and BACKENDS.cudnn.conv.fp32_precision == "tf32":
        # PyTorch 2.11: the layers keep their own default when the library's precision is set.
        assert before == after
        return
    assert before[0] != after[0]
    assert before[1] != after[1]
    json.dumps(after[0])


@pytest.mark.parametrize("name", [n for n in CHANGES if "older" not in n])
def test_precisions_are_put_back(name: str) -> None:
    before = precisions()
    CHANGES[name]()
    put_precisions(before)
    assert precisions() == before


def test_a_release_without_a_setting_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(backend: str, kind: str) -> str:
        raise RuntimeError("Invalid (backend, op) pair")

    monkeypatch.setattr(kernel_settings, "fp32_precision", refuse)
    monkeypatch.setitem(kernel_settings._GETTERS, "cudnn.enabled", lambda of: of.no_such_name)
    found = kernel_settings.kernel_settings()
    assert found["mkldnn.matmul.fp32_precision"] is None
    assert found["cudnn.enabled"] is None
    assert reduced_precisions() == ()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


@pytest.mark.parametrize(
    "name", ["all tf32", "oneDNN", "oneDNN's products", "CUDA's products", "cuDNN's convolutions"]
)
def test_a_setting_may_come_before_dispatch(name: str) -> None:
    net, x = Net(), torch.randn(32, 64)
    eager = copy.deepcopy(net)
    CHANGES[name]()
    set_before = precisions()
    tvmbridge.add_tvm_dispatch(net, x, on_fallback="raise")
    torch.testing.assert_close(net(x), eager(x))
    assert precisions() == set_before


def test_a_setting_that_changes_is_a_mode_of_its_own() -> None:
    net, x = Net().eval(), torch.randn(32, 64)
    eager = copy.deepcopy(net)
    tvmbridge.add_tvm_dispatch(net, x, on_fallback="raise")
    for name in (None, "oneDNN's products"):
        if name is not None:
            CHANGES[name]()
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(net(x), eager(x), rtol=1e-2, atol=1e-2)
    modes = [s.mode for s in tvmbridge.dispatch_report(net).specializations]
    assert modes == ["eval", "eval, float32 products of oneDNN in bf16"]


def test_the_precision_of_a_device_is_read_by_its_library() -> None:
    read = {device: kernel_settings.precision_reader(device) for device in ("cpu", "cuda")}
    assert [read["cpu"](), read["cuda"]()] != ["bf16", "tf32"]
    CHANGES["oneDNN's products"]()
    CHANGES["CUDA's products"]()
    assert [read["cpu"](), read["cuda"]()] == ["bf16", "tf32"]
    assert reduced_precisions() == (("CUDA", "tf32"), ("oneDNN", "bf16"))
