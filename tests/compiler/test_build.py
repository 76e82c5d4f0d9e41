"""Build: targets, and the arguments that may have any alignment."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.backends import BACKENDS, backend_for, known_target, resolve_target
from tvmbridge.compiler.build import build
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.core.errors import BuildError


@I.ir_module
class Linear:
    @R.function
    def forward(
        x: R.Tensor((2, 2, 8), "float32"),
        weight: R.Tensor((6, 8), "float32"),
        bias: R.Tensor((6,), "float32"),
    ):
        with R.dataflow():
            rows = R.reshape(x, (4, 8))
            transposed = R.permute_dims(weight)
            product = R.matmul(rows, transposed)
            total = R.nn.relu(R.add(product, bias))
            gv = (total,)
            R.output(gv)
        return gv


def test_only_what_our_loops_read_must_be_aligned() -> None:
    built = build(Linear, resolve_target(None), [])
    assert built.unaligned == {"forward": (True, True, False)}
    loaded = LoadedModule(built.machine, built.unaligned)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 8), (6, 8), (6,)]
    tensors = [
        torch.randn(1 + torch.Size(s).numel(), generator=generator)[1:].view(s) for s in shapes
    ]
    prepared = loaded.prepare("forward", tensors)
    assert [p is t for p, t in zip(prepared, tensors, strict=True)] == [True, True, False]
    (result,) = loaded.call("forward", prepared)
    expected = torch.nn.functional.linear(tensors[0].view(4, 8), *tensors[1:]).relu()
    torch.testing.assert_close(result, expected)


def test_what_is_not_contiguous_is_copied_all_the_same() -> None:
    built = build(Linear, resolve_target(None), [])
    loaded = LoadedModule(built.machine, built.unaligned)
    weight = torch.randn(8, 6).t()
    prepared = loaded.prepare("forward", [torch.randn(2, 2, 8), weight, torch.randn(6)])
    assert prepared[1].is_contiguous()
    assert torch.equal(prepared[1], weight)


class Folded(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, torch.ones_like(x), torch.zeros(2), x.new_full((3,), 2.0) + 1


@pytest.mark.parametrize("training", [True, False])
def test_who_writes_into_a_folded_result_writes_into_no_code(training: bool) -> None:
    module, x = Folded().train(training), torch.randn(3, requires_grad=True)
    add_tvm_dispatch(module, x)
    for _ in range(2):
        results = module(x)
        for result, expected in zip(results, Folded()(x), strict=True):
            torch.testing.assert_close(result, expected)
        for result in results[1:]:
            result.mul_(3)
        if training:
            x.grad = None
            results[0].sum().backward()
            assert x.grad.tolist() == [2, 2, 2]
            x.grad.mul_(5)
    assert dispatch_report(module).fallbacks == {}


@pytest.mark.parametrize("target", ["c", {"kind": "c"}])
def test_targets_without_support_are_named(target: object) -> None:
    with pytest.raises(BuildError, match=r"target 'c' is not supported; use llvm, cuda, rocm"):
        known_target(target)
    with pytest.raises(BuildError, match=r"target 'c' is not supported"):
        resolve_target(target)


def test_a_target_that_tvm_does_not_know_is_named() -> None:
    with pytest.raises(BuildError, match=r"does not know the target 'no such target'"):
        known_target("no such target")


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("llvm", "cuda"),
        ({"kind": "llvm", "mcpu": "x86-64-v3"}, "cuda"),
        ({"kind": "cuda", "arch": "sm_90"}, "cpu"),
        ({"kind": "rocm", "mcpu": "gfx90a"}, "cpu"),
    ],
)
def test_a_target_for_another_device_is_refused(target: object, device: str) -> None:
    with pytest.raises(BuildError, match=f"does not fit tensors on '{device}'"):
        resolve_target(target, torch.device(device))


@pytest.mark.parametrize("target", [None, "llvm"])
def test_tensors_on_another_device_are_refused(target: object) -> None:
    with pytest.raises(BuildError, match="'mps' are not supported; move the module to 'cpu' or"):
        resolve_target(target, torch.device("mps"))


def test_a_gpu_may_be_named_by_its_architecture() -> None:
    named = resolve_target({"kind": "cuda", "arch": "sm_90"}, torch.device("cuda"))
    assert (named.kind.name, named.attrs["arch"]) == ("cuda", "sm_90")
    assert backend_for(named) is BACKENDS["cuda"]
    assert backend_for(known_target({"kind": "rocm", "mcpu": "gfx90a"})) is BACKENDS["cuda"]
    assert backend_for(resolve_target(None)) is BACKENDS["cpu"]


def test_llvm_is_this_machine() -> None:
    assert str(resolve_target("llvm")) == str(resolve_target(None))
    named = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    assert resolve_target(named) is named or str(resolve_target(named)) == str(named)


@I.ir_module
class OnlyCalls:
    @R.function
    def forward(x: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            product = R.matmul(x, x)
            gv = (product,)
            R.output(gv)
        return gv


def test_a_module_of_calls_alone_needs_no_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    loaded = LoadedModule(build(OnlyCalls, resolve_target(None), []).machine)
    x = torch.randn(4, 4)
    torch.testing.assert_close(loaded.call("forward", [x])[0], x @ x)


@I.ir_module
class View:
    @R.function
    def backward(x: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            row = R.reshape(x, (16,))
            gv = (row,)
            R.output(gv)
        return gv


def test_the_virtual_machine_keeps_no_result() -> None:
    loaded = LoadedModule(build(View, resolve_target(None), []).machine, {"backward": [True]})
    memory = np.ones(16, dtype=np.float32)
    alive = weakref.ref(memory)
    (result,) = loaded.call("backward", [torch.from_numpy(memory).view(4, 4)])
    assert result.data_ptr() == memory.ctypes.data
    del memory, result
    assert alive() is None
