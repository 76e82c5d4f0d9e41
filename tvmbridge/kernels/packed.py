"""Products with weights that were packed once, in the layout of the library that multiplies.

A packed weight is a tensor of the library's own, which DLPack cannot carry. Compiled code gets a
*ticket* for it, a tensor of one number. In the graph such a product is
``call_pure_packed("tvmbridge.packed_matmul", spec, x, ticket[, bias])``, where ``spec`` is JSON:
``{"rows": rows of x, "then": [name, algorithm]}``: what is applied to each element of the result.
"""

from __future__ import annotations

import functools
import itertools
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.kernels.keys import spec_named
from tvmbridge.kernels.tensors import run_on

PACKED_MATMUL = "tvmbridge.packed_matmul"
ONEDNN, MKL = "onednn", "mkl"
NOTHING = ("none", "")

_numbers = itertools.count(1)
_weights: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class WeightPacking:
    """How a weight is packed: by which library, for so many rows of the other operand.

    ``transposed``: the weight lies as that of a linear layer does, (columns, depth).
    """

    library: str
    rows: int
    transposed: bool

    def pack(self, weight: torch.Tensor) -> Packed:
        """``weight``, which is float32 and of two dimensions, packed."""
        with torch.no_grad():
            own = (weight if self.transposed else weight.t()).detach().contiguous()
            return Packed(_PACKERS[self.library](own, self.rows))


class Packed:
    """A packed weight; compiled code finds it by its ``ticket`` as long as this object lives.

    Args:
        run: the kernel that reads it, on the other operands.
    """

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self.run = run
        number = next(_numbers)
        self.ticket = torch.tensor([number])
        _weights[number] = self

    @staticmethod
    def of(ticket: torch.Tensor) -> Packed:
        """The packed weight that ``ticket`` stands for."""
        return _weights[int(ticket)]


def _onednn(weight: torch.Tensor, rows: int) -> Callable[..., torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    kernel = torch.ops.mkldnn._linear_pointwise.default

    def multiply(
        x: torch.Tensor, bias: torch.Tensor | None, name: str, algorithm: str
    ) -> torch.Tensor:
        result: torch.Tensor = kernel(x, packed, bias, name, [], algorithm)
        return result

    return multiply


def _mkl(weight: torch.Tensor, rows: int) -> Callable[..., torch.Tensor]:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    kernel = torch.ops.mkl._mkl_linear.default

    def multiply(
        x: torch.Tensor, bias: torch.Tensor | None, name: str, algorithm: str
    ) -> torch.Tensor:
        result: torch.Tensor = kernel(x, packed, weight, bias, rows)
        return result

    return multiply


_PACKERS = {ONEDNN: _onednn, MKL: _mkl}


def packed_spec(rows: int, then: tuple[str, str] = NOTHING) -> str:
    """The spec of a product."""
    return json.dumps({"rows": rows, "then": then})


@functools.lru_cache(maxsize=4096)
def _then(key: str) -> tuple[str, str]:
    name, algorithm = json.loads(spec_named(key))["then"]
    return name, algorithm


def run_packed_matmul(key: str, *tensors: Any) -> torch.Tensor:
    """Run one product; registered with TVM under :data:`PACKED_MATMUL`."""

    def run(x: torch.Tensor, ticket: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return Packed.of(ticket).run(x, bias, *_then(key))

    return run_on(run, tensors)
