"""ATen operators on images: the arguments and results that may have their channels last."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvmbridge.kernels.aten_call import (
    ATEN_CALL,
    aten_call_operator,
    packed_call,
    spec_of,
    tensors_of,
)
from tvmbridge.legalize.aten.windows_last import pools_by_chains
from tvmbridge.passes.base import dtype_of

LAST = [0, 2, 3, 1]
"""The order of an image's dimensions with channels last."""

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_TRANSPOSED = 7  # the position of the argument
_POOLS = ("aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default")


@dataclass(frozen=True)
class _Images:
    """The positions of the arguments and results of an operator that are images."""

    arguments: tuple[int, ...] = (0,)
    results: tuple[int, ...] = (0,)


_OPERATORS = {
    # The weight and its gradient have the dimensions of images, too.
    CONVOLUTION_BACKWARD: _Images((0, 1, 2), (0, 1)),
    "aten.native_batch_norm.default": _Images(),
    "aten._native_batch_norm_legit.default": _Images(),
    "aten._native_batch_norm_legit.no_stats": _Images(),
    "aten._native_batch_norm_legit_functional.default": _Images(),
    "aten.native_batch_norm_backward.default": _Images((0, 1)),
    "aten.max_pool2d_with_indices.default": _Images(results=(0, 1)),
    "aten.max_pool2d_with_indices_backward.default": _Images((0, 1, 7)),
    "aten.avg_pool2d.default": _Images(),
    "aten.avg_pool2d_backward.default": _Images((0, 1)),
    "aten._adaptive_avg_pool2d.default": _Images(),
    "aten._adaptive_avg_pool2d_backward.default": _Images((0, 1)),
    "aten.upsample_nearest2d.default": _Images(),
    "aten.upsample_nearest2d_backward.default": _Images(),
}


@dataclass(frozen=True)
class ImageCall:
    """An ATen call with images among its arguments.

    - ``content``: the parsed spec of the call.
    - ``arguments``: for each argument that is an image, its position and the number of its tensor.
    - ``results``: the positions of the operator's results that are images.
    """

    call: relax.Call
    content: dict[str, Any]
    arguments: dict[int, int]
    results: tuple[int, ...]

    @classmethod
    def of(cls, call: relax.Call) -> ImageCall | None:
        """Return the images of ``call``; None if it is no ATen call, or has no form for them."""
        known = _OPERATORS.get(aten_call_operator(call) or "")
        if known is None:
            return None
        content, tensors = spec_of(call), tensors_of(call)
        arguments = {}
        for position in known.arguments:
            number = _number(content["args"][position : position + 1])
            if number is None or tensors[number].ty.ndim != len(LAST):
                return None
            arguments[position] = number
        if content["op"] == CONVOLUTION_BACKWARD and content["args"][_TRANSPOSED]:
            return None
        return cls(call, content, arguments, known.results)

    @property
    def images(self) -> list[relax.Expr]:
        """The arguments that are images."""
        tensors = tensors_of(self.call)
        return [tensors[number] for number in self.arguments.values()]

    @property
    def is_gradient(self) -> bool:
        """Whether it computes gradients of a convolution."""
        return self.content["op"] == CONVOLUTION_BACKWARD

    @property
    def dtype(self) -> str:
        """The dtype of the first image."""
        return dtype_of(self.images[0])

    @property
    def fields(self) -> frozenset[int] | None:
        """The fields of the call's tuple that are images; None if its result is one image."""
        places = self.content["results"]
        if places is None:
            return None
        return frozenset(i for i, place in enumerate(places) if place in self.results)

    def with_channels_last(
        self, moved: Callable[[relax.Expr], relax.Expr], others: Callable[[relax.Expr], relax.Expr]
    ) -> relax.Call:
        """Return the call on images with channels last.

        Args:
            moved: returns an image with channels last.
            others: returns what replaces an argument that is no image.
        """
        content = {**self.content, "args": list(self.content["args"])}
        for position, number in self.arguments.items():
            content["args"][position] = {"channels_last": number}
        # Loops exist for images with channels second alone.
        content.pop("compiled", None)
        content["channels_last"] = True if self.fields is None else list(self.results)
        images = set(self.arguments.values())
        tensors = [
            moved(t) if i in images else others(t) for i, t in enumerate(tensors_of(self.call))
        ]
        (type_,) = self.call.ty_args
        if self.fields is None:
            return packed_call(ATEN_CALL, json.dumps(content), tensors, type_with_last(type_))
        types = [type_with_last(t) if i in self.fields else t for i, t in enumerate(type_.fields)]
        return packed_call(ATEN_CALL, json.dumps(content), tensors, relax.TupleType(types))


def is_pooled_by_loops(call: relax.Call) -> bool:
    """Whether loops compute a pooling of images with channels last."""
    return aten_call_operator(call) in _POOLS and pools_by_chains(spec_of(call))


def pooled_by_loops(call: relax.Call, image: relax.Expr) -> relax.Call:
    """Return such a pooling of ``image``, which has channels last."""
    content = spec_of(call)
    first, *rest = content["args"]
    content |= {"args": [{"channels_last": first["tensor"]}, *rest], "channels_last": True}
    content["compiled"] = True
    (type_,) = call.ty_args
    is_tuple = isinstance(type_, relax.TupleType)
    moved = [type_with_last(t) for t in (type_.fields if is_tuple else [type_])]
    result = relax.TupleType(moved) if is_tuple else moved[0]
    return packed_call(ATEN_CALL, json.dumps(content), [image], result)


def operands_of(call: relax.Call) -> list[relax.Expr]:
    """Return the operands of ``call``, with a tuple's fields in its place."""
    found: list[relax.Expr] = []
    for operand in call.args:
        found += list(operand.fields) if isinstance(operand, relax.Tuple) else [operand]
    return found


def type_with_last(type_: relax.TensorType) -> relax.TensorType:
    """Return the type of an image with its channels last."""
    sizes = list(type_.shape.values)
    return relax.TensorType([sizes[axis] for axis in LAST], type_.dtype)


def _number(argument: Sequence[Any]) -> int | None:
    """Return the number of the tensor that an argument is; None if it is something else."""
    if argument and isinstance(argument[0], dict) and set(argument[0]) == {"tensor"}:
        return int(argument[0]["tensor"])
    return None
