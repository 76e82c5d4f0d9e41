"""Matrix products by PyTorch's libraries, on strided views of the operands in memory.

In the graph a product is ``call_dps_packed("tvmbridge.matmul", (spec, a, b[, bias]))`` with a
result that Relax allocates. ``spec`` is JSON: ``{"views": [view of a, view of b], "result":
shape}``. A view is ``[size, stride]`` over the operand's memory, or null for the operand itself.
Both operands are matrices or batches of matrices; a bias is a row that is added to each row.

``call_pure_packed("tvmbridge.onednn_matmul", spec, a, b[, bias])`` is the same product of float32
matrices by oneDNN's kernel, which allocates its result.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from tvmbridge.kernels.keys import spec_named
from tvmbridge.kernels.tensors import run_on

MATMUL = "tvmbridge.matmul"
ONEDNN_MATMUL = "tvmbridge.onednn_matmul"

View = tuple[tuple[int, ...], tuple[int, ...]] | None
# The shape of an operand in memory, and the view of it that is multiplied.
Operand = tuple[tuple[int, ...], View]


def matmul_spec(views: tuple[View, View], result: tuple[int, ...]) -> str:
    """Return the JSON spec of a product whose shape ``result`` has two or three dimensions."""
    return json.dumps({"views": views, "result": result})


@functools.lru_cache(maxsize=4096)
def program(key: str) -> Callable[..., None]:
    """Return a function that computes the product described by a spec, by ATen.

    ``key`` is the key of the spec, or the spec itself. The function takes the operands and, as the
    last argument, the tensor to write the result into.
    """
    content = json.loads(spec_named(key))
    left, right = (_viewer(v) for v in content["views"])
    shape = tuple(content["result"])
    if len(shape) == 3:

        def run_batched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            torch.bmm(left(a), right(b), out=out.view(shape))

        return run_batched

    def run(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> None:
        out = rest[-1]
        if out.shape != shape:
            out = out.view(shape)
        if len(rest) == 1:
            torch.mm(left(a), right(b), out=out)
        else:
            torch.addmm(rest[0], left(a), right(b), out=out)

    return run


@functools.lru_cache(maxsize=4096)
def onednn_program(key: str) -> Callable[..., torch.Tensor]:
    """Return a function that computes the product described by a spec, by oneDNN.

    ``key`` is the key of the spec, or the spec itself. The function returns a new tensor.
    """
    left, right = (_viewer(v) for v in json.loads(spec_named(key))["views"])
    kernel = torch.ops.mkldnn._linear_pointwise

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = kernel(left(a), right(b).t(), bias, "none", [], "")
        return result

    return run


def _viewer(view: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if view is None:
        return lambda tensor: tensor
    size, stride = view
    return lambda tensor: tensor.as_strided(size, stride)


def run_matmul(key: str, *tensors: Any) -> None:
    """Run one product; registered in TVM as :data:`MATMUL`. The last tensor is the result."""
    run_on(program(key), tensors)


def run_onednn_matmul(key: str, *tensors: Any) -> torch.Tensor:
    """Run one product by oneDNN; registered in TVM as :data:`ONEDNN_MATMUL`."""
    return run_on(onednn_program(key), tensors)


def described_product(key: str) -> tuple[Any, Any, tuple[int, ...]]:
    """Return the views of both operands and the shape of the result, for the compiled half."""
    content = json.loads(spec_named(key))
    left, right = (None if v is None else (tuple(v[0]), tuple(v[1])) for v in content["views"])
    return left, right, tuple(content["result"])
