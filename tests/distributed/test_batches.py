"""Mini-batches cut into micro-batches, and their digests."""

from __future__ import annotations

import pytest
import torch

from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed.batches import check_sizes, digest, split


def test_split_cuts_the_first_dimension_of_nested_tensors() -> None:
    x, y = torch.arange(6).reshape(6, 1), torch.arange(12).reshape(6, 2)
    first, second = split({"x": x, "y": (y, 3)}, 2)
    assert torch.equal(first["x"], x[:3])
    assert torch.equal(second["y"][0], y[3:])
    assert second["y"][1] == 3


def test_what_does_not_divide_is_said_with_what_would_fit() -> None:
    with pytest.raises(PipelineError) as error:
        split(torch.zeros(6, 2), 4)
    assert str(error.value) == (
        "a batch of 6 cannot be cut into 4 micro-batches; 1, 2, 3, 6 would fit, and so would "
        "batches of 4 or 8"
    )
    with pytest.raises(PipelineError, match=r"have \[4, 6\] as their first dimension"):
        split((torch.zeros(6), torch.zeros(4)), 2)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_a_digest_changes_with_any_element_and_their_order(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(4, 6).remainder(3).to(dtype)
    same = digest((x, {"a": x}))
    assert same == digest((x.clone(), {"a": x.clone()}))
    for place in range(24):
        other = x.clone()
        other.view(-1)[place] = 1 - other.view(-1)[place].to(torch.int64).clamp(max=1)
        if not torch.equal(other, x):
            assert digest((other, {"a": x})) != same
    assert digest((x.flip(1), {"a": x})) != same
    assert digest((x.reshape(6, 4), {"a": x})) != same
    assert digest(x[:, ::2]) == digest(x[:, ::2].contiguous())


def test_other_sizes_than_the_samples_are_named() -> None:
    sample = [torch.zeros(2, 3), 4]
    check_sizes([torch.ones(2, 3), 4], sample)
    with pytest.raises(PipelineError, match=r"a micro-batch of input 0 is torch.float32 \[2, 5\]"):
        check_sizes([torch.ones(2, 5), 4], sample)
    with pytest.raises(PipelineError, match="input 1 is 5, in the sample it was 4"):
        check_sizes([torch.ones(2, 3), 5], sample)
