"""Numbers of PyTorch's symbolic traces."""

from __future__ import annotations

from typing import Any

import torch

# The classes of numbers that are expressions of symbols.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expression_of(size: Any) -> Any:
    """Return the expression of a size that is symbolic; another size is returned as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
