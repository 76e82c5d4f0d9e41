"""Exceptions in kernels reach the caller of compiled code unchanged, and the next call is right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import nn

from tests.dispatch_helpers import eager
from tests.interrupts import subjects
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.kernels.callbacks import callback, integers


class OwnError(Exception):
    """An error whose class TVM does not know, and whose ``str`` raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Calling(nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


ERRORS = (KeyboardInterrupt, MemoryError, RecursionError, RuntimeError, SystemExit, OwnError)


@pytest.fixture(scope="module")
def net() -> Iterator[tuple[nn.Module, nn.Module]]:
    module = subjects.net(nn.BatchNorm1d(32)).train()
    reference = eager(module)
    add_tvm_dispatch(module, subjects.sample())
    subjects.train(module, subjects.sample())
    subjects.assert_calls_kernels(module)
    yield module, reference
    assert not dispatch_report(module).fallbacks


@contextmanager
def kernel_that_calls(fail: Callable[..., Any], backward: bool) -> Iterator[None]:
    """Have a kernel of PyTorch in the network's forward, or in its backward, call ``fail``."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("native_batch_norm_backward" if backward else "sort.stable", fail, "CPU")
        yield


def in_worker(function: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    if raised:
        raise raised[0]


def at_once(function: Callable[[], None]) -> None:
    function()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("run", thinned([at_once, in_worker], 2))
@pytest.mark.parametrize("backward", [False, True])
def test_an_exception_of_a_kernel_arrives_as_it_is(
    net: tuple[nn.Module, nn.Module],
    backward: bool,
    run: Callable[[Callable[[], None]], None],
) -> None:
    module, reference = net
    errors = [ERRORS[number % len(ERRORS)]("stop", number) for number in range(300)]
    raised = []

    def fail(*_: Any, **__: Any) -> Any:
        raise errors[len(raised)]

    with kernel_that_calls(fail, backward):
        for error in errors:
            with pytest.raises(type(error)) as found:
                run(lambda: module(subjects.sample()).sum().backward())
            raised.append(found.value)
    assert all(one is other for one, other in zip(raised, errors, strict=True))
    subjects.assert_same_training(module, reference)


def test_an_exception_of_a_custom_operator_arrives_as_it_is() -> None:
    """Custom operators are called through Python, ATen operators by the compiled half."""
    waiting: list[BaseException] = []

    @torch.library.custom_op("tvmbridge_tests::failing", mutates_args=())
    def failing(x: torch.Tensor) -> torch.Tensor:
        if waiting:
            raise waiting[-1]
        return x.sin()

    failing.register_fake(torch.empty_like)
    module = nn.Sequential(nn.Linear(8, 8), Calling(lambda x: failing(x)))
    module.eval().requires_grad_(False)
    x = torch.randn(4, 8)
    reference = eager(module)
    add_tvm_dispatch(module, x)
    for error in [kind("stop", number) for number in range(50) for kind in ERRORS]:
        waiting[:] = [error]
        with pytest.raises(type(error)) as found:
            module(x)
        assert found.value is error
    waiting.clear()
    torch.testing.assert_close(module(x), reference(x))
    assert not dispatch_report(module).fallbacks


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_an_exception_leaves_the_statistics_as_they_were(
    net: tuple[nn.Module, nn.Module],
) -> None:
    module, _ = net
    before = [b.clone() for b in module.buffers()]

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with kernel_that_calls(fail, backward=False), pytest.raises(KeyboardInterrupt):
        module(subjects.sample())
    torch.testing.assert_close(list(module.buffers()), before, rtol=0, atol=0)


def test_the_recursion_limit_is_met_anywhere() -> None:
    called = callback(lambda text: text)

    def below(depth: int) -> Any:
        return below(depth - 1) if depth else called("a string that is no small one")

    limit, depths = sys.getrecursionlimit(), []
    frame: Any = sys._getframe()
    while frame is not None:
        limit, frame = limit - 1, frame.f_back
    for depth in range(limit - 60, limit + 20):
        try:
            assert below(depth).startswith("a string")
        except RecursionError:
            depths.append(depth)
    assert 20 <= len(depths) < 80


def test_arguments_come_by_value() -> None:
    seen: list[Any] = []
    called = callback(lambda *arguments: seen.extend(arguments))
    shape, dtype = tvm_ffi.Shape((3, 1 << 40)), tvm_ffi.dtype("bfloat16")
    called("s", "a string that is no small one", shape, dtype, 5, 2.5, True, None)
    assert seen[:2] == ["s", "a string that is no small one"]
    assert integers(seen[2]) == (3, 1 << 40)
    assert [seen[3] & 255, seen[3] >> 8 & 255, seen[3] >> 16] == [4, 16, 1]
    assert seen[4:] == [5, 2.5, True, None]


def test_a_callback_keeps_its_function_and_no_more() -> None:
    before = sys.getrefcount(OwnError)

    def made() -> tvm_ffi.Function:
        kept = OwnError
        return callback(lambda: kept.__name__)

    for _ in range(50):
        assert made()() == "OwnError"
    assert sys.getrefcount(OwnError) <= before + 2
