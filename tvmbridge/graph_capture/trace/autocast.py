"""Autocast regions: operators are refused whose traced dtype is not that of eager PyTorch.

Autocast also applies to the operators that a composite kernel calls (``affine_grid`` calls a
matrix product, say). A trace that records the composite, or decomposes it below autocast, has
other dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import OpOverload, pytree, wrap_with_autocast
from tvmbridge.graph_capture.trace.promotion import dtypes_of_zeros


def refuse_other_dtypes(program: ExportedProgram) -> None:
    """Refuse operators whose kernels return another dtype under autocast than the trace has.

    Args:
        program: as exported, not yet decomposed.

    Raises:
        CaptureError: there is one.
    """
    for device, dtype, op, node in _called_under_autocast(program.graph_module):
        args, kwargs = pytree.tree_map_only(fx.Node, _value, (node.args, node.kwargs))
        with torch.autocast(device, dtype):
            found = dtypes_of_zeros(op, args, kwargs, device)
        seen = node.meta["val"]
        traced = [
            value.dtype if isinstance(value, torch.Tensor) else None
            for value in (seen if isinstance(seen, tuple | list) else [seen])
        ]
        if found is not None and found != traced:
            raise CaptureError(
                f"{op} under autocast gives {_names(found)} in eager PyTorch, and "
                f"{_names(traced)} in a trace; call it outside of autocast"
            )


def _called_under_autocast(
    graph_module: fx.GraphModule,
) -> Iterator[tuple[str, torch.dtype, OpOverload, fx.Node]]:
    """Operators within regions where autocast is on, with its device and dtype."""
    for node in graph_module.graph.find_nodes(op="call_function", target=wrap_with_autocast):
        device, dtype, enabled, _, region, *_ = node.args
        inner = getattr(graph_module, region.target)
        yield from _called_under_autocast(inner)
        for call in inner.graph.nodes if enabled else ():
            if isinstance(call.target, OpOverload):
                yield device, dtype, call.target, call


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _names(dtypes: list[torch.dtype | None]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes if d is not None)
