"""Numbers of PyTorch's symbolic traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

# The classes of numbers that are expressions of symbols.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Checks of sizes; the relations between sizes contain the same conditions.
_CHECKS = frozenset(
    {
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    }
)


def expression_of(size: Any) -> Any:
    """Return the expression of a size that is symbolic; another size is returned as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_number(node: fx.Node) -> bool:
    """Whether a node computes or checks a size."""
    return node.target in _CHECKS or isinstance(node.meta.get("val"), SYMBOLIC)


def hint_of(number: Any) -> Any:
    """Return the value that a symbolic number has in the trace; None if it depends on data.

    Any other value is returned as it is.
    """
    return number.node.hint if isinstance(number, SYMBOLIC) else number
