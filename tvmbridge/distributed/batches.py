"""Mini-batches cut into micro-batches, and compared between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.errors import PipelineError
from tvmbridge.core.torch_private import pytree

# Odd, so that a change of any bit of an element changes the digest.
_MIXER = 0x5851F42D4C957F2D
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def batch_size(tree: Any) -> int | None:
    """The length of the first dimension that the tensors of ``tree`` have in common.

    Raises:
        PipelineError: they have different ones.
    """
    sizes = {t.shape[0] for t in _tensors(tree) if t.dim()}
    if len(sizes) > 1:
        raise PipelineError(f"tensors of one batch have {sorted(sizes)} as their first dimension")
    return sizes.pop() if sizes else None


def split(tree: Any, microbatches: int) -> list[Any]:
    """``tree`` once for each micro-batch; tensors are cut along their first dimension.

    Tensors without dimensions, and what is no tensor, are the same in each.

    Raises:
        PipelineError: the micro-batches do not divide the batch; the message has what would fit.
    """
    size = batch_size(tree)
    if size is not None and size % microbatches:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        raise PipelineError(
            f"a batch of {size} cannot be cut into {microbatches} micro-batches; "
            f"{', '.join(map(str, fitting))} would fit, and so would batches of "
            f"{_nearest(size, microbatches)}"
        )
    leaves, spec = pytree.tree_flatten(tree)
    cut = [
        leaf.chunk(microbatches)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
        else (leaf,) * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([c[i] for c in cut], spec) for i in range(microbatches)]


def _nearest(size: int, microbatches: int) -> str:
    below = size // microbatches * microbatches
    return " or ".join(str(n) for n in (below, below + microbatches) if n)


def check_sizes(given: Sequence[Any], captured: Sequence[Any]) -> None:
    """Compare a micro-batch's leaves with those that the stages were made for."""
    if len(given) != len(captured):
        raise PipelineError(
            f"a call has {len(given)} values, the sample of the pipeline {len(captured)}"
        )
    for i, (value, sample) in enumerate(zip(given, captured, strict=True)):
        name = f"input {i}"
        if isinstance(sample, torch.Tensor):
            if not isinstance(value, torch.Tensor):
                raise PipelineError(f"{name} is {type(value).__name__}, in the sample a tensor")
            if (value.shape, value.dtype) != (sample.shape, sample.dtype):
                raise PipelineError(
                    f"a micro-batch of {name} is {value.dtype} {list(value.shape)}, the pipeline "
                    f"was made for {sample.dtype} {list(sample.shape)}"
                )
        elif isinstance(value, torch.Tensor) or value != sample:
            raise PipelineError(f"{name} is {value!r}, in the sample it was {sample!r}")


def digest(tree: Any) -> tuple[int, tuple[Any, ...]]:
    """A number for the bits of all tensors of ``tree``, and their shapes and dtypes."""
    total = torch.zeros((), dtype=torch.int64)
    shapes = []
    for position, tensor in enumerate(_tensors(tree)):
        shapes.append((tuple(tensor.shape), str(tensor.dtype)))
        bits = tensor.detach().contiguous()
        if bits.dtype is torch.bool:
            bits = bits.to(torch.uint8)
        if bits.is_complex():
            bits = torch.view_as_real(bits)
        bits = bits.view(_BITS[bits.element_size()]).flatten().to(torch.int64)
        places = torch.arange(position + 1, position + 1 + len(bits), device=bits.device)
        mixed = (bits ^ (places * _MIXER)) * _MIXER
        # Folded, so that what a sum of products would let cancel does not.
        total = total.to(bits.device) + ((mixed ^ (mixed >> 29)) * _MIXER).sum()
    return int(total.item()), tuple(shapes)


def difference(expected: Any, found: Any) -> str:
    """How two digests differ, in words."""
    if expected[1] != found[1]:
        return f"its tensors are {_shapes(found[1])}, not {_shapes(expected[1])}"
    return "its values differ"


def _shapes(shapes: Any) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in shapes)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """``inputs`` of a step as forward takes them: a tuple, keyword arguments, or one argument."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
        return (), dict(inputs)
    return (inputs,), {}
