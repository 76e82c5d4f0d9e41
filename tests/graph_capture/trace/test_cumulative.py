"""Batch norms with cumulative averages: tracing one does not affect other threads."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tvmbridge.graph_capture.trace.cumulative  # noqa: F401  (its patch)
from tvmbridge.calls.patches import table_patched_here


class _Asked(TorchFunctionMode):
    """A mode that records whether ``float(tensor)`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.Tensor.__float__
        return func(*args, **(kwargs or {}))


def _asks_for_a_number(module: nn.Module) -> bool:
    with _Asked() as asked:
        module(torch.randn(4, 3))
    return asked.found


def test_only_the_thread_that_traces_computes_with_tensors() -> None:
    own, other = (nn.BatchNorm1d(3, momentum=None) for _ in range(2))
    # accelerate and other libraries leave forward as an attribute of the instance.
    own.forward = own.forward
    answers: list[bool] = []
    with table_patched_here(own):
        thread = threading.Thread(target=lambda: answers.append(_asks_for_a_number(other)))
        thread.start()
        thread.join()
        assert answers == [True]
        assert not _asks_for_a_number(own)
        assert not _asks_for_a_number(other)
    assert _asks_for_a_number(own)
    assert _asks_for_a_number(other)
