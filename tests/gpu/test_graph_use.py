"""CUDA graphs together with other uses of a module, its parameters and the GPU."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.gpu.helpers import (
    GPU,
    STEPS,
    Values,
    assert_same,
    batch,
    gradients,
    pair,
    replays,
    skips,
    small,
    with_dropout,
)
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import free_cublas_workspaces
from tvmbridge.runtime.cuda_graphs import GraphMemory, ReplayedCall

pytestmark = GPU


def _step(module: nn.Module, number: int) -> Values:
    module.zero_grad()
    output = module(batch(number))
    output.square().sum().backward()
    return {"output": output.detach()} | gradients(module)


def _assert_steps(tvm: nn.Module, eager: nn.Module, steps: int = STEPS, seed: int = 0) -> None:
    for number in range(steps):
        values = []
        for module in (tvm, eager):
            torch.manual_seed(seed + number)
            values.append(_step(module, seed + number))
        assert_same(*values)


def test_calls_on_another_stream() -> None:
    tvm, eager = pair(small, batch())
    _assert_steps(tvm, eager)
    before = replays(tvm)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _assert_steps(tvm, eager, 3, seed=100)
    torch.cuda.current_stream().wait_stream(stream)
    assert skips(tvm)["it is on another stream than the calls before"] > 0
    _assert_steps(tvm, eager, 2, seed=200)
    assert replays(tvm) > before


def _replace(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(part.weight.detach() * 1.5)


def _move(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = p.data.clone() * 1.5


def _load(module: nn.Module) -> None:
    module.load_state_dict({n: v * 1.5 for n, v in module.state_dict().items()})


def _assign(module: nn.Module) -> None:
    module.load_state_dict({n: v * 1.5 for n, v in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [_replace, _move, _load, _assign])
def test_parameters_that_change(change: Callable[[nn.Module], None]) -> None:
    tvm, eager = pair(small, batch())
    for seed in (0, 100):
        _assert_steps(tvm, eager, seed=seed)
        change(tvm)
        change(eager)
    _assert_steps(tvm, eager, seed=200)
    assert replays(tvm) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
        lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    ],
    ids=["sgd", "adamw"],
)
def test_optimizers(make: Callable[..., torch.optim.Optimizer]) -> None:
    tvm, eager = pair(small, batch())
    optimizers = [make(module.parameters()) for module in (tvm, eager)]
    for number in range(STEPS):
        values = [_step(module, number) for module in (tvm, eager)]
        # Copy eager's gradients: Adam divides a gradient by its own size, so a gradient that is
        # only rounding error would give a large step.
        for ours, theirs in zip(tvm.parameters(), eager.parameters(), strict=True):
            ours.grad = theirs.grad.clone() if theirs.grad is not None else None
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*values)
    assert replays(tvm) > 0


class Decaying(nn.Module):
    """A module whose backward reads a buffer's value from before forward wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale.clone()
        self.scale.mul_(0.9)
        return y


def test_a_buffer_that_backward_reads_is_written() -> None:
    tvm, eager = pair(Decaying, batch())
    _assert_steps(tvm, eager)
    assert_same(dict(tvm.named_buffers()), dict(eager.named_buffers()))
    assert not dispatch_report(tvm).fallbacks


def test_two_dispatched_modules_in_one_model() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(with_dropout(), nn.Tanh(), small()).cuda()
    tvm = copy.deepcopy(eager)
    add_tvm_dispatch(tvm[0], batch())
    add_tvm_dispatch(tvm[2], batch().requires_grad_())
    _assert_steps(tvm, eager)
    assert replays(tvm[0]) > 0
    assert replays(tvm[2]) > 0


def test_a_caller_who_captures_our_call() -> None:
    tvm, eager = pair(small, batch(), train=False)
    x = batch()
    with torch.no_grad():
        for _ in range(STEPS):
            tvm(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = tvm(x)
        for number in range(4):
            x.copy_(batch(number))
            graph.replay()
            assert_same({"output": output}, {"output": eager(x)})
            other = batch(50 + number)
            assert_same({"output": tvm(other)}, {"output": eager(other)})
    assert any("being captured" in reason for reason in skips(tvm))


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    skipped = Counter[str]()

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0] + float(inputs[0].sum())]

    memory = GraphMemory(torch.device("cuda", 0))
    call = ReplayedCall(run, None, memory, Counter(), skipped, "forward")
    stream, x = torch.cuda.current_stream(), torch.ones(4, device="cuda")
    assert [call([x]) for _ in range(4)] == [None] * 4
    assert any("cannot be captured" in reason for reason in skipped)
    assert torch.cuda.current_stream() == stream
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(torch.randn(4, device="cuda"))
    assert torch.equal(*draws)
    tvm, eager = pair(with_dropout, batch())
    _assert_steps(tvm, eager)
    assert replays(tvm) > 0


def test_calls_without_graphs_under_the_profiler() -> None:
    tvm, eager = pair(small, batch(), cuda_graphs=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for number in range(STEPS):
            assert_same(_step(tvm, number), _step(eager, number))
    assert not dispatch_report(tvm).fallbacks


def test_the_cache_is_emptied_between_calls() -> None:
    tvm, eager = pair(with_dropout, batch())
    for number in range(STEPS):
        _assert_steps(tvm, eager, 1, seed=number)
        torch.cuda.empty_cache()
        torch.full((1 << 22,), float("nan"), device="cuda")
    assert replays(tvm) > 0


def test_graphs_of_torch_compile_in_between() -> None:
    tvm, eager = pair(small, batch())
    torch._dynamo.reset()
    theirs = small().cuda()
    other = torch.compile(copy.deepcopy(theirs), mode="reduce-overhead")
    for number in range(STEPS):
        _assert_steps(tvm, eager, 1, seed=number)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            assert_same({"output": other(batch()).clone()}, {"output": theirs(batch())})
    del other
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    _assert_steps(tvm, eager, seed=100)
    assert replays(tvm) > 0


def test_a_deep_copy_has_graphs_of_its_own() -> None:
    tvm, eager = pair(small, batch())
    _assert_steps(tvm, eager)
    copied, other = copy.deepcopy(tvm), copy.deepcopy(eager)
    _replace(copied)
    _replace(other)
    assert replays(copied) == 0
    for number in range(STEPS):
        _assert_steps(copied, other, 1, seed=number)
        _assert_steps(tvm, eager, 1, seed=number)
    assert replays(copied) > 0


def test_memory_does_not_grow() -> None:
    tvm, _ = pair(with_dropout, batch())
    optimizer = torch.optim.SGD(tvm.parameters(), lr=1e-4)
    held = []
    gc.collect()
    gc.disable()  # Memory must be freed without the garbage collector.
    try:
        for number in range(320):
            tvm.zero_grad()
            tvm(batch(number)).square().sum().backward()
            optimizer.step()
            if number >= 20:
                held.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert max(held) == held[0]
    assert replays(tvm) > 300


def _peak_of_steps(dispatched: bool) -> int:
    """Return the most bytes that training steps of a network allocate, its weights included."""
    gc.collect()
    free_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    module = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)])
    module.cuda()
    x = torch.randn(8192, 512, device="cuda")
    if dispatched:
        add_tvm_dispatch(module, x)
    for number in range(STEPS):
        if number == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        module.zero_grad()
        module(x).square().sum().backward()
    assert not dispatched or replays(module) > 0
    return torch.cuda.max_memory_allocated() - before


def test_a_step_allocates_no_more_than_in_eager() -> None:
    assert _peak_of_steps(dispatched=True) <= _peak_of_steps(dispatched=False)


def test_memory_goes_with_the_module() -> None:
    gc.collect()
    free_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    tvm, eager = pair(small, batch())
    _assert_steps(tvm, eager)
    del tvm, eager
    gc.collect()
    free_cublas_workspaces()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_module_on_the_cpu_and_its_copy_on_the_gpu() -> None:
    torch.manual_seed(0)
    eager = small()
    here, there = copy.deepcopy(eager), copy.deepcopy(eager).cuda()
    on_gpu = copy.deepcopy(eager).cuda()
    add_tvm_dispatch(here, batch().cpu())
    add_tvm_dispatch(there, batch())
    for number in range(STEPS):
        _assert_steps(there, on_gpu, 1, seed=number)
        x = batch(number).cpu()
        values = []
        for module in (here, eager):
            module.zero_grad()
            module(x).square().sum().backward()
            values.append(gradients(module))
        assert_same(*values)
    assert not dispatch_report(here).fallbacks
    assert replays(there) > 0


def test_tensors_on_several_devices_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"cpu.*cuda:0"):
        add_tvm_dispatch(small().cuda(), batch().cpu())


def test_a_call_from_another_device_is_left_to_eager() -> None:
    tvm, eager = pair(small, batch())
    with pytest.raises(RuntimeError) as theirs:
        eager(batch().cpu())
    with pytest.raises(RuntimeError) as ours:
        tvm(batch().cpu())
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert sum(dispatch_report(tvm).fallbacks.values()) == 1


class OnTheCpu(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.arange(x.shape[0])


def test_a_result_on_another_device_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="returns a tensor on cpu"):
        add_tvm_dispatch(OnTheCpu(), torch.randn(3, device="cuda"))
