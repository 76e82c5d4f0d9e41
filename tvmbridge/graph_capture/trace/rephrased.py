"""Functions of PyTorch that no trace can take as they are called, said in other words.

``tensor.data`` is ``tensor.detach()``: both are the same memory without a history. A trace would
lose what is assigned to it. ``random_(a, b)`` has an overload called ``from``, which is no name in
the Python that a trace is written in; it draws as ``random_(b - a)`` does, and adds ``a``. What
``copy_`` copies is converted first: torch.export forgets to, for a buffer that is written whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import symbolic_shapes
from tvmbridge.graph_capture.dependence import DependenceError

_DATA: Any = torch.Tensor.data

_ASKING = {
    torch.Tensor.__bool__: "takes a way that a data-dependent value decides",
    torch.Tensor.__int__: "needs a data-dependent value as a Python number",
    torch.Tensor.__index__: "needs a data-dependent value as a Python number",
    torch.Tensor.__float__: "needs a data-dependent value as a Python number",
    torch.Tensor.__setitem__: (
        "writes to x[i] where i is a tensor of one number: write x.index_copy_ or x.index_fill_ "
        "with i.reshape(1)"
    ),
}


class FunctionsRephrased(TorchFunctionMode):
    """Within it functions are called as said above.

    Raises:
        DependenceError: forward assigns to ``tensor.data``, or asks for a number that only a call
            knows.
        UnsupportedOperatorError: ``random_`` is given bounds that cannot be said otherwise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            raise DependenceError(
                "assigns to .data of a tensor, which a trace does not see: write "
                "`with torch.no_grad(): tensor.copy_(value)`"
            )
        if func is torch.Tensor.copy_:
            return _copied(*args, **(kwargs or {}))
        if func is torch.Tensor.random_:
            return _random(func, *args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except symbolic_shapes().GuardOnDataDependentSymNode as error:
            if func in _ASKING:
                raise DependenceError(_ASKING[func]) from error
            raise


def _copied(tensor: torch.Tensor, other: Any, non_blocking: bool = False) -> torch.Tensor:
    """``tensor.copy_(other)``, where a trace would give ``tensor`` the dtype of ``other``."""
    return tensor.copy_(other.to(tensor.dtype) if other.dtype is not tensor.dtype else other)


def _random(func: Any, tensor: torch.Tensor, *bounds: Any, **named: Any) -> torch.Tensor:
    """``tensor.random_(...)``, by the overload that takes one bound."""
    generator = {k: named.pop(k) for k in ("generator",) if k in named}
    if "from" in named or len(bounds) > 1 or (bounds and "to" in named):
        low, high = bounds[0] if bounds else named["from"], (*bounds[1:], named.get("to"))[0]
        if not _holds_exactly(tensor.dtype, low, high):
            raise UnsupportedOperatorError(
                f"forward calls random_({low}, {high}) on {tensor.dtype}, which no trace can name: "
                "use torch.randint, or random_ with one bound"
            )
        drawn: torch.Tensor = func(tensor, high - low, **generator)
        return drawn.add_(low) if low else drawn
    result: torch.Tensor = func(tensor, *bounds, **named, **generator)
    return result


def _holds_exactly(dtype: torch.dtype, low: Any, high: Any) -> bool:
    """Whether ``dtype`` has all integers between the bounds, and their distance."""
    if type(low) is not int or type(high) is not int or low >= high or dtype is torch.bool:
        return False
    if dtype.is_floating_point:
        most = int(2 / torch.finfo(dtype).eps)
        return max(abs(low), abs(high), high - low) <= most
    limits = torch.iinfo(dtype)
    return limits.min <= low and max(high, high - low) - 1 <= limits.max
