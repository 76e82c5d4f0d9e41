"""Products with weights that were packed once, into the memory layout of the library.

A packed weight is an opaque tensor of the library, which DLPack cannot pass to compiled code. So
compiled code has a *ticket* for it, a tensor with one number. In the graph such a product is
``call_pure_packed("tvmbridge.packed_matmul", spec, x, ticket[, bias])``. ``spec`` is JSON:
``{"rows": rows of x, "then": [name, algorithm]}``, where ``then`` names the function that oneDNN
applies to each element of the result.
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
    """The way in which a weight is packed.

    - ``library``: ``ONEDNN`` or ``MKL``.
    - ``rows``: the number of rows of the other operand.
    - ``transposed``: whether the weight is in memory as (columns, depth), as in a linear layer.
    """

    library: str
    rows: int
    transposed: bool

    def pack(self, weight: torch.Tensor) -> Packed:
        """Pack ``weight``, a float32 matrix."""
        with torch.no_grad():
            own = (weight if self.transposed else weight.t()).detach().contiguous()
            return Packed(_PACKERS[self.library](own, self.rows))


class Packed:
    """A packed weight; compiled code finds it by its ``ticket`` as long as this object lives.

    - ``run``: calls the library's kernel with this weight; takes the other operands.
    - ``ticket``: a tensor with the number of this weight.
    """

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self.run = run
        number = next(_numbers)
        self.ticket = torch.tensor([number])
        _weights[number] = self

    @staticmethod
    def of(ticket: torch.Tensor) -> Packed:
        """Return the packed weight with the number in ``ticket``."""
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
    """Return the JSON spec of a product with a packed weight; ``then`` is applied to the result."""
    return json.dumps({"rows": rows, "then": then})


@functools.lru_cache(maxsize=4096)
def _then(key: str) -> tuple[str, str]:
    name, algorithm = json.loads(spec_named(key))["then"]
    return name, algorithm


def run_packed_matmul(key: str, *tensors: Any) -> torch.Tensor:
    """Run one product with a packed weight; registered in TVM as :data:`PACKED_MATMUL`."""

    def run(x: torch.Tensor, ticket: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return Packed.of(ticket).run(x, bias, *_then(key))

    return run_on(run, tensors)
