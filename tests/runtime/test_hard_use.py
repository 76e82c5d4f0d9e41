"""Threads, forks, many shapes, many calls, and modules that must be freed."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import BuildError, add_tvm_dispatch, capture, dispatch_report
from tvmbridge.calls.standins import as_captured
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.surroundings import tracing_here


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())


def _x(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 2, rows * 6).reshape(rows, 6)


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_threads_race_to_the_first_call_and_go_on() -> None:
    module = add_tvm_dispatch(_net().eval().requires_grad_(False), _x())
    module.requires_grad_(True).train()  # the first call compiles code for this mode
    reference = eager(module)

    def work(number: int) -> None:
        for rows in (3, 4, 3):  # 4 rows run the own forward, while other threads may compile
            x = _x(rows) + number
            ours, theirs = (
                torch.autograd.grad(m(x).square().sum(), list(m.parameters()))
                for m in (module, reference)
            )
            torch.testing.assert_close(ours, theirs)

    _in_threads(8, work)
    report = dispatch_report(module)
    assert report.tvm_calls == 16
    assert report.fallbacks == {"the shape of an input differs": 8}
    assert len(report.specializations) == 2


def test_other_threads_call_while_one_traces_and_trace_after_it() -> None:
    x = _x()
    served = add_tvm_dispatch(_net().eval().requires_grad_(False), x)
    captured: list[object] = []
    capturing = threading.Thread(target=lambda: captured.append(capture(_net().eval(), x)))
    with compiling(), tracing_here(), as_captured():
        calling = threading.Thread(target=served, args=(x,))
        calling.start()
        calling.join()
        capturing.start()
        capturing.join(timeout=2)
        assert capturing.is_alive()
    capturing.join()
    assert len(captured) == 1
    report = dispatch_report(served)
    assert (report.tvm_calls, report.fallbacks) == (1, {})


@pytest.mark.slow
def test_dispatch_in_several_threads_at_once_and_nested() -> None:
    network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).eval()
    expected = network(_x())
    _in_threads(4, lambda number: add_tvm_dispatch(network[number], _x()))
    torch.testing.assert_close(network(_x()), expected)
    add_tvm_dispatch(network, _x())
    torch.testing.assert_close(network(_x()), expected)
    assert [dispatch_report(layer).tvm_calls for layer in network] == [1] * 4
    assert dispatch_report(network).tvm_calls == 1
    assert not torch.compiler.is_compiling()


def _in_child(work: Callable[[], Any], seconds: int = 60) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os.write(write, repr(work()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    until = time.monotonic() + seconds
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise TimeoutError("the child hangs")
        time.sleep(0.05)
    return os.read(read, 10000).decode()


def test_a_forked_process_runs_the_own_forward() -> None:
    module = add_tvm_dispatch(_net().eval(), _x())
    expected = module(_x())

    def work() -> Any:
        right = torch.allclose(module(_x()), expected)
        module.train()
        module(_x())
        return right, dispatch_report(module).fallbacks, dispatch_report(module).tvm_calls

    assert _in_child(work) == repr((True, {"the process was forked after dispatch": 2}, 1))
    module(_x())
    assert dispatch_report(module).tvm_calls == 2


def test_specialisations_not_used_for_longest_are_dropped() -> None:
    module = nn.ReLU().eval()
    for rows in range(1, 7):
        add_tvm_dispatch(module, _x(rows), options={"max_specializations": 3})
        module(_x(1))  # makes the first specialization the most recently used
    report = dispatch_report(module)
    assert report.dropped == 3
    kept = {s.signature for s in report.specializations}
    assert kept == {f"({(rows, 6)} float32)" for rows in (1, 5, 6)}
    assert "dropped" in str(report)


def test_modules_and_tensors_are_let_go() -> None:
    module = add_tvm_dispatch(_net().train(), _x().requires_grad_())
    x = _x().requires_grad_()
    output = module(x)
    references = [weakref.ref(t) for t in (module, module[0].weight, x, output)]  # type: ignore[index]
    del x, output, module
    gc.collect()
    assert [r() for r in references] == [None] * 4


def test_a_module_that_calls_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.inner(x) if depth == 0 else self(self.inner(x), depth - 1)

    module = add_tvm_dispatch(Recursive().train(), _x())
    torch.testing.assert_close(module(_x()), eager(module)(_x()))
    assert dispatch_report(module).tvm_calls == 1


@pytest.mark.slow
def test_deep_and_many_inputs() -> None:
    class Takes(nn.Module):
        def forward(self, nested: Any, many: list[torch.Tensor]) -> torch.Tensor:
            for _ in range(50):
                nested = nested[0]
            return nested * 2 + sum(many)

    nested: Any = _x()
    for _ in range(50):
        nested = [nested]
    many = [_x() for _ in range(40)]
    module = add_tvm_dispatch(Takes().eval(), (nested, many))
    torch.testing.assert_close(module(nested, many), _x() * 42)
    assert dispatch_report(module).tvm_calls == 1


def test_copies_of_copies_keep_their_own_guard() -> None:
    module = add_tvm_dispatch(_net().eval(), _x())
    second = copy.deepcopy(copy.deepcopy(module))
    second[0].weight.data.zero_()  # type: ignore[index, union-attr, operator]
    second[1].eps = 0.5  # type: ignore[index]
    with torch.no_grad():
        torch.testing.assert_close(second(_x()), eager(second)(_x()))
    assert dispatch_report(second).fallbacks == {"the attribute 1.eps changed": 1}


def test_an_unknown_target_leaves_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _net()
    with pytest.raises(BuildError):
        add_tvm_dispatch(module, _x(), target="nonsense")
    assert "forward" not in module.__dict__
