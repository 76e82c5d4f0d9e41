"""Wrappers around dispatched modules call the dispatch, or are refused with advice."""

from __future__ import annotations

import copy
import functools
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager, make_block, sample
from tests.thinned import but_slow
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report, remove_tvm_dispatch


def _block() -> nn.Module:
    return make_block().eval().requires_grad_(False)


def test_torch_compile_calls_the_dispatch() -> None:
    block, x = _block(), sample()
    outer = nn.Sequential(nn.Tanh(), block, nn.Tanh())
    expected = outer(x)
    add_tvm_dispatch(block, x)
    for module in (outer, block):
        compiled = torch.compile(module, backend="eager")
        for _ in range(2):
            found = compiled(x)
        torch.testing.assert_close(found, expected if module is outer else eager(block)(x))
    report = dispatch_report(block)
    assert (report.tvm_calls, report.fallbacks) == (4, {})
    remove_tvm_dispatch(block)


def test_one_whole_graph_is_refused_by_torch_compile() -> None:
    torch.compiler.reset()  # Dynamo skips frames in which an earlier test broke a graph.
    block, x = add_tvm_dispatch(_block(), sample()), sample()
    outer = nn.Sequential(nn.Tanh(), block)
    with pytest.raises(Exception, match="remove_tvm_dispatch"):
        torch.compile(outer, backend="eager", fullgraph=True)(x)
    remove_tvm_dispatch(block)
    torch.compile(outer, backend="eager", fullgraph=True)(x)


def test_data_parallel_without_devices_calls_the_dispatch() -> None:
    block, x = add_tvm_dispatch(_block(), sample()), sample()
    torch.testing.assert_close(nn.DataParallel(block)(x), eager(block)(x))
    assert dispatch_report(block).tvm_calls == 1


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compile"])
def test_a_wrapper_is_not_dispatched(wrap: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"it is a wrapper, which calls its .*; dispatch what it holds"
    ):
        add_tvm_dispatch(wrap(_block()), sample())


def test_parameters_sharded_by_a_wrapper_are_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        """A stand-in for PyTorch's class of this name, which needs a process group."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(CaptureError, match="FullyShardedDataParallel, and"):
        add_tvm_dispatch(nn.Sequential(FullyShardedDataParallel()), sample())


def _prepare(module: nn.Module) -> None:
    """Wrap forward for mixed precision, as accelerate's ``prepare_model`` does."""
    held = module.forward
    function = held.__func__ if hasattr(held, "__func__") else held

    @functools.wraps(function)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*args, **kwargs)

    @functools.wraps(under_autocast)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        return under_autocast(*args, **kwargs).float()

    bound = hasattr(held, "__func__")
    module.forward = types.MethodType(in_float32, module) if bound else in_float32  # type: ignore[method-assign]


@pytest.mark.parametrize("first", ["dispatched", "wrapped"])
def test_a_wrapped_forward_calls_the_dispatch(first: str) -> None:
    module, x = (
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).train(),
        torch.randn(3, 8),
    )
    reference = copy.deepcopy(module)
    if first == "dispatched":
        add_tvm_dispatch(module, x)
    _prepare(module)
    _prepare(reference)
    if first == "wrapped":
        add_tvm_dispatch(module, x)
    for _ in range(3):
        for net in (module, reference):
            net.zero_grad()
            net(x).flatten()[::3].sum().backward()
        for a, b in zip(module.parameters(), reference.parameters(), strict=True):
            assert b.grad is not None
            bound = 0.01 * float(b.grad.abs().max())
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=bound)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})
    if first == "dispatched":
        with pytest.raises(ValueError, match="unwrap it first"):
            remove_tvm_dispatch(module)


class CallsItself(nn.Module):
    """A module whose attribute holds a function that reads the module: a copy would read it too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.act = lambda x: self.inner(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", but_slow([False, True], False))
def test_modules_that_are_traced_themselves_have_code_for_any_size(wrapped: bool) -> None:
    module, reference = (CallsItself().eval().requires_grad_(False) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    add_tvm_dispatch(module, torch.randn(3, 8), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    for each in (module, reference) if wrapped else ():
        _prepare(each)
    for size in (4, 6, 1, 9):
        x = torch.randn(size, 8)
        torch.testing.assert_close(module(x), reference(x), rtol=0.02, atol=0.02)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})


def test_a_submodule_that_torch_compile_wraps_is_served() -> None:
    torch.compiler.reset()
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    block = nn.Sequential(torch.compile(inner, backend="eager"), nn.Tanh()).double()
    reference = copy.deepcopy(nn.Sequential(inner, block[1]))
    add_tvm_dispatch(block)
    x = torch.randn(3, 4, dtype=torch.float64)
    for training in (True, True, False):
        results = []
        for module in (block, reference):
            torch.manual_seed(0)
            results.append(module.train(training)(x))
        torch.testing.assert_close(*results)
    assert dispatch_report(block).tvm_calls == 3
    inner.eval()
    block[1].train()


@pytest.mark.parametrize("kind", [nn.Linear, CallsItself], ids=["copied", "itself"])
def test_a_call_during_the_trace_runs_the_wrapper(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = (CallsItself() if kind is CallsItself else nn.Linear(8, 8)).eval()
    module.requires_grad_(False)
    reference, x = copy.deepcopy(module), torch.randn(3, 8)
    add_tvm_dispatch(module, on_fallback="silent")
    for each in (module, reference):
        _prepare(each)
    genuine, found = torch.export.export, []
    other = threading.Thread(target=lambda: found.append(module(x)))

    def export(*args: Any, **kwargs: Any) -> Any:
        other.start()
        other.join(0.2)  # It may wait for the code.
        return genuine(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    found.append(module(x))
    other.join()
    assert len(found) == 2
    for result in found:
        torch.testing.assert_close(result, reference(x), rtol=0, atol=1e-6)
