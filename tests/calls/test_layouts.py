"""The strides of outputs, and the dimension order in which compiled code returns them."""

from __future__ import annotations

import pytest
import torch

from tvmbridge.calls.layouts import dense_strides
from tvmbridge.calls.layouts import layout_of as layout


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 2), (1, 3, 1)])
def test_contiguous_tensors_have_none(shape: tuple[int, ...]) -> None:
    assert layout(torch.empty(shape)) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).permute(4, 2, 0, 1, 3),
        torch.randn(2, 1, 4).transpose(0, 2),
        torch.randn(2, 3).as_strided((2, 1, 3), (3, 1, 1)),
    ],
    ids=["transposed", "channels_last", "permuted", "with_one", "no_order"],
)
def test_a_permuted_tensor_is_laid_out_without_a_move(tensor: torch.Tensor) -> None:
    found = layout(tensor)
    assert found is not None
    values = tensor.permute(found.order)
    dense = values.clone(memory_format=torch.contiguous_format)
    found.put_on(dense)
    assert dense.stride() == tensor.stride()
    assert torch.equal(dense, tensor)
    assert dense._base is None
    assert dense.storage_offset() == 0
    assert torch.equal(dense.permute(found.order), values)


def test_dimensions_of_one_move_nothing() -> None:
    strange = layout(torch.empty(20).as_strided((2, 1, 4), (4, 1, 1)))
    assert strange is not None
    assert not strange.moves
    rows = layout(torch.empty(2, 3).t())
    assert rows is not None
    assert rows.moves


def test_what_does_not_fill_its_memory_keeps_the_order() -> None:
    tensor = torch.randn(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    assert dense_strides(tensor) == tensor.stride()
    assert dense_strides(tensor[:, ::2]) == (60, 1, 15, 3)
    assert dense_strides(torch.randn(3, 1).expand(3, 4)) is None
    assert dense_strides(3) is None
    assert dense_strides(torch.eye(2).to_sparse()) is None
