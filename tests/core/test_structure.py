"""Structures: nested values, also dataclasses, are flattened and rebuilt from their leaves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.frontend.helpers import Function, assert_like_eager
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.structure import opened, unflatten

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


@dataclasses.dataclass(frozen=True)
class Result:
    left: Any
    right: Any = None


@dataclasses.dataclass
class Beside:
    value: Any

    def __post_init__(self) -> None:
        self.hidden = 1


def test_dataclasses_are_opened_and_made_again() -> None:
    kept = [Result(1)]
    value = {"a": Result([1, Result("x")], kept), "b": Beside(2)}
    leaves, spec = pytree.tree_flatten(opened(value, {id(kept)}))
    assert leaves == [1, "x", None, *kept]
    again = unflatten(leaves, spec)
    assert again == value
    assert vars(again["b"]) == {"value": 2, "hidden": 1}
    assert opened(value["b"], known={id(value["b"])}) is value["b"]
    assert (type(again["a"]), again["b"]) == (Result, value["b"])
    plain = [1, (kept, 2)]
    assert opened(plain, {id(kept)}) is plain


def _in_dataclasses(x: torch.Tensor) -> Any:
    y = x * 2
    return Result([y, Result(y[:1], 3)], {"sum": y.sum(), "given": Result(x)})


def test_results_in_dataclasses_are_those_of_eager_pytorch() -> None:
    module = Function(_in_dataclasses).eval()
    x = torch.ones(2, 3)
    add_tvm_dispatch(module, x)
    found = module(x * 3)
    assert (type(found), type(found.left[1]), found.left[1].right) == (Result, Result, 3)
    torch.testing.assert_close(found.left[1].left, torch.full((1, 3), 6.0))
    torch.testing.assert_close(found.right["sum"], torch.tensor(36.0))
    assert torch.equal(found.right["given"].left, x * 3)
    assert dispatch_report(module).tvm_calls == 1


def test_an_object_that_contains_itself_is_left() -> None:
    class Node:
        def __init__(self) -> None:
            self.value = torch.ones(2)
            self.itself: object = self

    node = Node()
    assert opened([node])[0] is node
