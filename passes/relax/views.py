"""The view of a tensor's memory that an operator of Relax describes, as PyTorch computes it."""

from __future__ import annotations

import torch
from tvm import relax

from tvmbridge.passes.base import PERMUTATION, RESHAPES, is_call, permutation, shape_of

SLICE = "relax.strided_slice"
VIEWS = (PERMUTATION, *RESHAPES, SLICE)
"""Operators of one tensor that :func:`viewed` knows."""


def viewed(tensor: torch.Tensor, call: relax.Call) -> torch.Tensor:
    """Return the view of ``tensor``, often a meta tensor, that one of :data:`VIEWS` makes.

    Raises:
        RuntimeError: the operator copies, or its shape is not static.
    """
    if is_call(call, PERMUTATION):
        return tensor.permute(permutation(call))
    if is_call(call, SLICE):
        return _sliced(tensor, call)
    shape = shape_of(call)
    if shape is None:
        raise RuntimeError("the shape is not static")
    return tensor.view(shape)


def _sliced(tensor: torch.Tensor, call: relax.Call) -> torch.Tensor:
    fields = [[int(n) for n in argument.fields] for argument in call.args[1:]]
    axes, begins, ends = fields[:3]
    steps = fields[3] if len(fields) > 3 else [1] * len(axes)
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        if step < 1:
            raise RuntimeError("a slice in reverse order copies")
        index = [slice(None)] * tensor.dim()
        index[axis] = slice(begin, end, step)
        tensor = tensor[tuple(index)]
    return tensor
