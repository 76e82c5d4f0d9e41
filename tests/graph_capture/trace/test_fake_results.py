"""Traces share fake results, and only where these cannot differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.frontend.helpers import Function
from tvmbridge import add_tvm_dispatch
from tvmbridge.core.torch_private import FakeTensorMode
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels


def misses_of(call: Callable[[Any], Any], x: torch.Tensor, symbols: bool = False) -> int:
    """Return how many results a call on a fake of ``x`` computes that were not known."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbols else None)
    with mode, strides_of_kernels():
        fake = mode.from_tensor(x, static_shapes=True)
        before = FakeTensorMode.cache_info().misses
        call(fake)
        return FakeTensorMode.cache_info().misses - before


def normed(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


def test_modes_with_other_settings_share_results() -> None:
    FakeTensorMode.cache_clear()
    x = torch.randn(3, 5)
    assert misses_of(normed, x) > 3
    assert misses_of(normed, x, symbols=True) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x * 1, lambda x: x * 1.0),
        (lambda x: x * 1, lambda x: x * True),
        (lambda x: x * 2, lambda x: x.double() * 2),
        (lambda x: x * 2, lambda x: x.mT.contiguous().mT * 2),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.sum([0]), lambda x: x.sum([0, 1])),
        (lambda x: x * 2, lambda x: torch.cat([x, x])[:4] * 2),
    ],
)
def test_other_calls_have_other_results(
    first: Callable[[Any], Any], second: Callable[[Any], Any]
) -> None:
    x = torch.arange(16).view(4, 4)
    for call in (first, second):
        mode = FakeTensorMode()
        with mode, strides_of_kernels():
            fake = call(mode.from_tensor(x))
        result = call(x)
        assert (fake.shape, fake.dtype) == (result.shape, result.dtype)
        assert fake.stride() == result.stride()


def test_the_default_dtype_is_part_of_a_call() -> None:
    def mean() -> torch.dtype:
        mode = FakeTensorMode()
        with mode, strides_of_kernels():
            return (mode.from_tensor(torch.arange(4)) * 0.5).dtype

    assert mean() is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert mean() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_symbols_have_the_keys_of_pytorch() -> None:
    for size in (4, 6):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode, strides_of_kernels():
            assert int((mode.from_tensor(torch.ones(size)) * 2).shape[0]) == size


def test_shapes_that_depend_on_values_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="nonzero"):
            misses_of(torch.nonzero, torch.ones(4))


def test_the_trace_of_a_module_leaves_results_to_the_next() -> None:
    FakeTensorMode.cache_clear()
    add_tvm_dispatch(Function(normed), torch.randn(3, 7))
    assert misses_of(normed, torch.randn(3, 7)) == 0
