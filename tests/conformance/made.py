"""Operators made of our own expressions, which test special values and the accuracy of sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing import make_tensor
from torch.testing._internal.opinfo.core import SampleInput

from tests.conformance import expressions, integer_expressions, long_expressions
from tests.conformance.expressions import Expression
from tests.conformance.like_opinfo import FLOATS, INTEGERS, LikeOpInfo


@dataclass(frozen=True)
class Made(LikeOpInfo):
    """Several expressions as one operator, with a sample for each expression.

    - ``expressions``: functions of ``count`` tensors; a sample names its function by index.
    - ``gradient``: whether gradients are checked too.
    - ``shape``: the shape of each tensor.
    - ``local``: whether a result element depends only on the operands' elements at its place.
    """

    name: str
    expressions: tuple[Expression, ...]
    dtypes: frozenset[torch.dtype]
    count: int = 1
    gradient: bool = True
    shape: tuple[int, ...] = (5, 7)
    local: bool = False
    variant_test_name: str = "made"

    def op(self, which: int, *tensors: torch.Tensor) -> Any:
        """Evaluate the expression at index ``which``."""
        return self.expressions[which](*tensors)

    def sample_inputs(
        self, device: str, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[SampleInput]:
        """Yield a sample for each expression."""
        for which in range(len(self.expressions)):
            tensors = [
                make_tensor(self.shape, dtype=dtype, device=device) for _ in range(self.count)
            ]
            yield SampleInput(which, args=tuple(t.requires_grad_(requires_grad) for t in tensors))


MADE: tuple[Made, ...] = (
    Made("identities", expressions.IDENTITIES, FLOATS, local=True),
    Made("numbers", expressions.NUMBERS, FLOATS, local=True),
    Made("powers", expressions.POWERS, FLOATS, local=True),
    Made("reductions", expressions.REDUCTIONS, FLOATS),
    Made("cancelled", expressions.CANCELLED, FLOATS, count=2, gradient=False),
    Made("pairs", expressions.PAIRS, FLOATS, count=2),
    Made("scatter_reductions", expressions.REDUCE, FLOATS, count=2),
    Made("integers", integer_expressions.INTEGER, INTEGERS, gradient=False),
    Made("integer_pairs", integer_expressions.INTEGER_PAIRS, INTEGERS, count=2, gradient=False),
)

# Operators on rows that are long enough for sums to be inaccurate.
LONG: tuple[Made, ...] = (
    Made("long_rows", long_expressions.LONG, FLOATS, shape=(8, 1600)),
    Made("long_pairs", long_expressions.LONG_PAIRS, FLOATS, count=2, shape=(8, 1600)),
)
