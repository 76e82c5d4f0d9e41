"""Structures: leaves put back where they came from."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.frontend.helpers import assert_like_eager
from tvmbridge.structure import unflatten

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "value",
    [
        1,
        torch.Size([]),
        torch.Size([2, 3]),
        (1, [torch.Size([4]), {"a": torch.Size([5]), "b": None}]),
        OrderedDict(x=Pair(torch.Size([1]), (2, 3))),
        (),
    ],
)
def test_leaves_go_back(value: Any) -> None:
    leaves, spec = pytree.tree_flatten(value)
    result = unflatten(leaves, spec)
    assert result == value
    assert pytree.tree_flatten(result)[1] == spec
    assert str(result) == str(value)


def test_a_size_is_returned_as_a_size() -> None:
    assert_like_eager(
        lambda x: (x.shape, torch.broadcast_shapes(x.shape, (4, 1, 1)), x + 1), torch.ones(2, 3)
    )
