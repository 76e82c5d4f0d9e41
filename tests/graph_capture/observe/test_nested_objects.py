"""What forward reads of deeply nested objects and containers is watched; the rest is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class Node:
    """A node of a configuration, which knows its parent."""

    def __init__(self, parent: Node | None = None) -> None:
        self.parent, self.child = parent, None
        self.scale, self.unread = 2.0, 0


class OfObjects(nn.Module):
    """Reads an attribute seven objects deep."""

    def __init__(self) -> None:
        super().__init__()
        self.config = last = Node()
        for _ in range(6):
            last.child = Node(last)  # type: ignore[assignment]
            last = last.child  # type: ignore[assignment]

    def last(self) -> Any:
        node: Any = self.config
        while node.child is not None:
            node = node.child
        return node

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        node = self.last()
        return x * node.scale * node.parent.parent.scale


class OfContainers(nn.Module):
    """Reads an entry six containers deep."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = {"a": {"b": [{"c": ({"scale": 2.0},)}]}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config["a"]["b"][0]["c"][0]["scale"]


def test_an_attribute_of_a_deep_object() -> None:
    module, x = add_tvm_dispatch(OfObjects(), torch.ones(2), on_fallback="silent"), torch.ones(2)
    assert module(x)[0] == 4
    module.last().unread = module.config.child.unread = 5
    assert module(x)[0] == 4
    assert dispatch_report(module).tvm_calls == 2
    module.last().scale = 3.0
    assert module(x)[0] == 6


def test_an_entry_of_a_deep_container() -> None:
    module, x = OfContainers(), torch.ones(2)
    add_tvm_dispatch(module, x, on_fallback="silent")
    assert module(x)[0] == 2
    module.config["a"]["b"][0]["c"][0]["scale"] = 7.0
    assert module(x)[0] == 7
