"""Outputs that are views of an intermediate tensor, which is not returned itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from tests.aliasing_helpers import Applied, relations, rows
from tests.dispatch_helpers import eager
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


def _hidden(m: Any, x: torch.Tensor) -> Any:
    """Return views of tensors that are not returned, or that are no base of all the views."""
    rows = x * m.weight
    written = x - m.weight
    view = written[0]
    view.mul_(2)
    written[1:].add_(m.weight)
    columns = x.t() * m.weight[:3]
    flowing = x + m.weight
    return {
        "rows": [rows[:2], None, (first := rows[1:]), {"again": first}],
        "written": (view, written[:2], written.t(), "a string"),
        "columns": (columns[:4], columns, columns.t()[1]),
        "detached first": (flowing.detach(), flowing, flowing.detach()[1:]),
        "unfolded": (x / 2).unfold(1, 3, 1),
        "expanded": (m.weight * 2).expand(3, 6),
        # linear itself returns a view of an internal tensor.
        "expanded linear": functional.linear(x[None], x)[:, :1].expand(-1, 4, -1),
        "apart": (x * 3).chunk(2, 1),
    }


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _traces_of_a_write(module: Any, number: int, grad: bool) -> Any:
    """Write into one output; return layouts, values and gradients, or None if the write raises."""
    x = rows().double().requires_grad_(grad)
    outputs = _tensors(module(x))
    layout = [(o.stride(), o.storage_offset(), o.requires_grad) for o in outputs[:-2]]
    try:
        outputs[number].mul_(3)
    except RuntimeError:
        return None
    values = [o.detach().clone() for o in outputs]
    if not grad:
        return layout, values
    total = sum((i + 1) * o.square().sum() for i, o in enumerate(outputs) if o.requires_grad)
    return layout, values, torch.autograd.grad(total, (x, module.weight))  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", thinned([False, True], 2), ids=["inference", "training"])
def test_overlapping_outputs_share_an_intermediate_base(grad: bool) -> None:
    x = rows().double().requires_grad_(grad)
    module = Applied(_hidden).double().train(grad)
    with torch.set_grad_enabled(grad):
        # ``check`` compares results and gradients of each call with the module's own forward.
        add_tvm_dispatch(module, x, options={"check": "always"})
        own = eager(module)
        outputs, expected = module(x), own(x)
        assert pytree.tree_structure(outputs) == pytree.tree_structure(expected)
        apart = len(_tensors(outputs["apart"]))
        shared, expected = _tensors(outputs)[:-apart], _tensors(expected)[:-apart]
        assert relations(shared, module, x) == relations(expected, own, x)
        for number in range(len(shared)):
            found = [_traces_of_a_write(each, number, grad) for each in (module, own)]
            torch.testing.assert_close(*found)
    report = dispatch_report(module)
    assert report.fallbacks == {}
    assert report.tvm_calls == 1 + len(shared)
