"""Tensors that compiled code returns are tensors of PyTorch's allocator again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from tvmbridge.core.borrowed import borrowed
from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.kernels import allocation

HALF = compiled_half("tvmbridge.kernels._products")
pytestmark = pytest.mark.skipif(HALF is None, reason="needs the compiled half")


def on_storage_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_a_tensor_from_dlpack_is_taken_back_on_its_own_storage() -> None:
    made = torch.randn(3, 8)
    HALF.note(made)
    wrapped = from_dlpack(made)
    assert not on_storage_of(wrapped, made)
    taken = HALF.take_back(wrapped.t())
    assert on_storage_of(taken, made)
    assert taken.stride() == (1, 8)
    assert torch.equal(taken, made.t())
    assert not taken._is_view()


def test_memory_that_was_not_noted_is_not_taken_back() -> None:
    assert HALF.take_back(from_dlpack(torch.randn(3, 8))) is None


def test_a_storage_that_is_gone_is_not_taken_back() -> None:
    made = torch.randn(3, 8)
    HALF.note(made)
    wrapped = borrowed(made)
    del made
    assert HALF.take_back(wrapped) is None


def test_a_taken_tensor_keeps_its_memory() -> None:
    made = torch.full((4,), 7.0)
    HALF.note(made)
    taken = HALF.take_back(from_dlpack(made))
    del made
    others = [torch.zeros(4) for _ in range(100)]
    assert taken.tolist() == [7.0] * 4
    assert len(others) == 100


def test_a_result_of_unknown_memory_is_copied_unless_it_is_an_arguments() -> None:
    argument = torch.randn(3, 8)
    result = from_dlpack(argument)
    assert allocation._taken_back(result, [argument, "x"]) is result
    copy = allocation._taken_back(result, [])
    assert copy.data_ptr() != argument.data_ptr()
    assert torch.equal(copy, argument)
