"""What forward reads of deeply nested objects and containers is watched; the rest is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.calls.copies import copied_values
from tvmbridge.core.contents import all_held, same_value


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


def _tree(levels: int, parent: Any = None) -> dict[str, Any]:
    node: dict[str, Any] = {"parent": parent, "weight": 1.0}
    node["children"] = [_tree(levels - 1, node) for _ in range(4)] if levels else []
    return node


def test_walks_pass_each_node_once() -> None:
    tree = _tree(3)
    assert len(all_held(tree)) < 2000
    assert len(all_held(tree, *tree["children"])) < 2000
    copied = copied_values({0: tree})[0]
    assert same_value(copied, tree)
    copied["children"][3]["children"][3]["children"][3]["weight"] = 2.0
    assert not same_value(copied, tree)
