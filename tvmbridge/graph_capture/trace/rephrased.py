"""Replace calls that torch.export cannot trace by equivalent ones.

- ``tensor.data`` becomes ``tensor.detach()``. Assignments to it are refused, because a trace would
  lose them.
- ``random_(a, b)`` becomes ``random_(b - a)``, plus ``a``. Its overload is named ``from``, a Python
  keyword, which generated code cannot use as a name.
- ``copy_`` converts dtypes before it copies. torch.export omits the conversion for a buffer that is
  overwritten as a whole.
"""

from __future__ import annotations

from typing import Any

import torch

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import symbolic_shapes
from tvmbridge.graph_capture.dependence import AS_NUMBER, BRANCHES, DependenceError
from tvmbridge.graph_capture.trace.function_table import Call, replaces

_DATA: Any = torch.Tensor.data

_NUMBER = "needs the value of a tensor as a Python number", AS_NUMBER
_ASKING = {
    torch.Tensor.__bool__: ("branches by the value of a tensor", BRANCHES),
    torch.Tensor.__int__: _NUMBER,
    torch.Tensor.__index__: _NUMBER,
    torch.Tensor.__float__: _NUMBER,
    torch.Tensor.__setitem__: (
        "writes to x[i] where i is a tensor of one number",
        "write x.index_copy_ or x.index_fill_ with i.reshape(1)",
    ),
}


@replaces(_DATA.__get__)
def _data(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].detach()


@replaces(_DATA.__set__)
def _data_assigned(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise DependenceError(
        "assigns to .data of a tensor, which a trace does not see: write "
        "`with torch.no_grad(): tensor.copy_(value)`"
    )


# Runs before the handler of ``fills.py`` for x[mask] = value.
@replaces(*_ASKING, order=-1)
def _asked(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return call(*args, **kwargs)
    except symbolic_shapes().GuardOnDataDependentSymNode as error:
        raise DependenceError(*_ASKING[call.function]) from error


@replaces(torch.Tensor.copy_)
def _copied(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, other = args[0], args[1] if len(args) > 1 else kwargs["src"]
    return call(tensor, other if other.dtype is tensor.dtype else other.to(tensor.dtype))


@replaces(torch.Tensor.random_)
def _drawn(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _random(call, *args, **kwargs)


def _random(func: Any, tensor: torch.Tensor, *bounds: Any, **named: Any) -> torch.Tensor:
    """Call ``tensor.random_(...)`` by an overload that takes at most one bound."""
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
    """Whether ``dtype`` represents all integers between the bounds, and their difference."""
    if type(low) is not int or type(high) is not int or low >= high or dtype is torch.bool:
        return False
    if dtype.is_floating_point:
        most = int(2 / torch.finfo(dtype).eps)
        return max(abs(low), abs(high), high - low) <= most
    limits = torch.iinfo(dtype)
    return limits.min <= low and max(high, high - low) - 1 <= limits.max
