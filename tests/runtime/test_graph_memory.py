"""Graphs of one module share memory: what they pass is held, and what is copied out is released."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tvmbridge.core.borrowed import borrowed
from tvmbridge.runtime import cuda_graphs
from tvmbridge.runtime.cuda_graphs import GraphMemory, ReplayedCall, _copied
from tvmbridge.runtime.graphed import _Training

_DEVICE = torch.device("cuda", 0)
Made = list["weakref.ref[torch.Tensor]"]


class _Captures:
    """Stands for CUDA's captures: records the pool of each, and fails if ``fails`` is set."""

    def __init__(self) -> None:
        self.pools: list[Any] = []
        self.fails = False

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None, **_: Any) -> Iterator[None]:
        self.pools.append(pool)
        yield
        if self.fails and pool is not None:
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> _Captures:
    made = _Captures()
    handles = itertools.count()
    for name, value in {
        "graph": made.graph,
        "CUDAGraph": mock.MagicMock,
        "graph_pool_handle": lambda: next(handles),
        "current_stream": lambda *_: mock.MagicMock(device=torch.device("cpu")),
        "set_stream": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("current_raw_stream", "gpu_settings", "gpu_index"):
        monkeypatch.setattr(cuda_graphs, name, lambda *_: 0)
    monkeypatch.setattr(cuda_graphs, "free_cublas_workspaces", lambda: None)
    return made


def _call(
    memory: GraphMemory,
    copies: int | None,
    run: Callable[[Sequence[torch.Tensor]], list[Any]],
    read: Sequence[int] = (),
) -> ReplayedCall:
    return ReplayedCall(run, copies, memory, Counter(), Counter(), "forward", read)


def _until_captured(call: ReplayedCall, x: torch.Tensor) -> list[Any] | None:
    assert call([x]) is None
    assert call([x]) is None
    return call([x])


def test_only_what_other_graphs_read_is_held(captures: _Captures) -> None:
    arena = torch.arange(12.0)
    made: Made = []

    def run(_: Sequence[torch.Tensor]) -> list[Any]:
        results = [arena[0:4].view(2, 2).t(), arena[4:8], arena[8:12]]
        made[:] = map(weakref.ref, results)
        return results

    call = _call(GraphMemory(_DEVICE), 2, run, read=[1])
    results = _until_captured(call, torch.zeros(1))
    assert results is not None
    assert [reference() is None for reference in made] == [True, False, False]
    for found, expected in zip(results, run([]), strict=True):
        assert torch.equal(found, expected)
    assert [r.data_ptr() == arena[4 * i :].data_ptr() for i, r in enumerate(results)] == [
        False,
        False,
        True,
    ]


def test_forward_and_backward_share_a_pool(captures: _Captures) -> None:
    memory, x = GraphMemory(_DEVICE), torch.ones(2)
    arena = torch.zeros(2)
    for copies in (0, None):
        _until_captured(_call(memory, copies, lambda _: [arena[:]]), x)
    _until_captured(_call(GraphMemory(_DEVICE), 0, lambda _: [arena[:]]), x)
    first, second, other = captures.pools
    assert first == second
    assert other != first


def test_memory_changes_before_a_capture_alone(captures: _Captures) -> None:
    first, second, x = GraphMemory(_DEVICE), GraphMemory(_DEVICE), torch.ones(2)
    call = _call(first, 0, lambda _: [x[:]])
    call.use(second)
    _until_captured(call, x)
    call.use(first)
    assert call.memory is second
    assert captures.pools == [second.pool(0)]


def test_streams_share_no_pool() -> None:
    memory = GraphMemory(_DEVICE)
    with mock.patch.object(torch.cuda, "graph_pool_handle", side_effect=itertools.count()):
        assert memory.pool(1) == memory.pool(1) != memory.pool(2)


def test_no_graph_is_captured_in_a_pool_whose_capture_failed(captures: _Captures) -> None:
    memory, x = GraphMemory(_DEVICE), torch.ones(2)
    captures.fails = True
    failed = _call(memory, 0, lambda _: [torch.zeros(2)])
    assert _until_captured(failed, x) is None
    assert failed([x]) is None
    assert list(failed.skipped) == [
        "it cannot be captured: operation not permitted when stream is capturing"
    ]
    captures.fails = False
    assert _until_captured(_call(memory, 0, lambda _: [torch.zeros(2)]), x) is not None
    pools = [pool for pool in captures.pools if pool is not None]
    assert len(pools) == len(set(pools)) == 2


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 4, 1)])
def test_a_borrowed_tensor_has_the_memory_and_strides(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    for given in (tensor, tensor.transpose(0, -1), tensor[..., :1], tensor[:1].expand(shape)):
        found = borrowed(given)
        assert torch.equal(found, given)
        assert found.data_ptr() == given.data_ptr()
        assert found.is_contiguous() or found.stride() == given.stride()
        assert found.untyped_storage()._cdata != given.untyped_storage()._cdata


def test_calls_made_elsewhere_count_before_the_capture(captures: _Captures) -> None:
    call = _call(GraphMemory(_DEVICE), None, lambda inputs: [inputs[0] + 1])
    call.count(2)
    assert call([torch.ones(3)]) is not None
    assert len(captures.pools) == 1


def test_a_forward_of_another_thread_waits_for_the_lease() -> None:
    """Check that no second forward is replayed before the residuals of the first are leased."""
    code, call, held = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    call.parts.kept_outputs, call.parts.num_outputs = (), 1
    code.skips = Counter()
    training = _Training(code, call, held)
    entered, ended = threading.Event(), threading.Event()

    def slowly(_: Sequence[torch.Tensor]) -> list[Any]:
        entered.set()
        ended.wait(0.2)
        return [torch.zeros(1), (), ()]

    training._forward = slowly  # type: ignore[assignment]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(training([]))) for _ in range(2)]
    threads[0].start()
    entered.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sorted(result is None for result in results) == [False, True]
    assert code.skips == {"the backward of an earlier call has not run": 1}


def test_results_of_every_dtype_are_copied() -> None:
    values = torch.tensor([1.0, -torch.inf, 2.0])
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool, torch.bfloat16):
        pair = [values.to(dtype), values.flip(0).to(dtype)]
        for copy, result in zip(_copied(pair, frozenset()), pair, strict=True):
            assert copy.data_ptr() != result.data_ptr()
            assert torch.equal(copy.view(torch.uint8), result.view(torch.uint8)), dtype
