"""The table of handlers: torch functions that are replaced during a trace of forward.

A handler is registered for the functions that it replaces, and is called as ``handler(call, args,
kwargs)``. In it, ``call(*args, **kwargs)`` calls the function's next handler, or the function
itself after the last handler. As in every torch-function mode, functions that a handler calls are
not handled again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import disable_current_modes, pytree
from tvmbridge.graph_capture.trace.foreign_derivatives import differentiable

Handler = Callable[["Call", tuple[Any, ...], dict[str, Any]], Any]
HandlerT = Callable[[Handler], Handler]

# Maps a function to its handlers by their order.
HANDLERS: dict[Any, dict[int, Handler]] = {}


@dataclass(frozen=True)
class Call:
    """A call of ``function``, and the handlers that have yet to be called for it."""

    function: Any
    handlers: Sequence[Handler]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.handlers:
            return self.function(*args, **kwargs)
        return self.handlers[0](Call(self.function, self.handlers[1:]), args, kwargs)


def replaces(*functions: Any, order: int = 0) -> HandlerT:
    """Register the decorated handler for ``functions``.

    Args:
        order: if a function has several handlers, the one with the lowest order is called first.
    """

    def enter(handler: Handler) -> Handler:
        for function in functions:
            if order in HANDLERS.setdefault(function, {}):
                raise ValueError(f"{function} has two handlers of order {order}")
            HANDLERS[function][order] = handler
        return handler

    return enter


class FunctionTable(TorchFunctionMode):
    """The torch-function mode that calls the handlers of a function in its place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        refuse_out_of_range(func, args, named)  # any function may be given a number
        chain = HANDLERS.get(func)
        if chain is None:
            return differentiable(func, args, named)(*args, **named)
        return Call(func, [chain[order] for order in sorted(chain)])(*args, **named)


_NUMBERS = frozenset((int, float))
_REFUSED = "without overflow"
# Not tried, because they would draw random numbers.
_DRAWS = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal",
        "normal_",
        "random_",
        "randint_like",
        "uniform_",
    }
)


def refuse_out_of_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call for which eager PyTorch raises because a number exceeds a dtype's range.

    ``torch.add(x, y, alpha=1e40)`` raises for float32, whereas ``x * 1e40`` is an infinity. Fake
    kernels do not check the range, so such a call is tried on zeros.
    """
    # Every function that forward calls comes here: a loop takes half of a generator's time.
    for value in (*args, *kwargs.values()):
        if type(value) in _NUMBERS and _is_large(value):
            if getattr(func, "__name__", "") not in _DRAWS:
                _try_on_zeros(func, args, kwargs)
            return


def _is_large(value: Any) -> bool:
    """Whether a number may be beyond the range of some dtype."""
    return type(value) in _NUMBERS and abs(value) > 127 and math.isfinite(value)


def _try_on_zeros(func: Any, args: Any, named: dict[str, Any]) -> None:
    leaves, structure = pytree.tree_flatten((args, named))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if _is_large(leaf)]
    if not any(_exceeds(number, tensor.dtype) for number in numbers for tensor in tensors):
        return
    with disable_current_modes(), torch.no_grad():
        zeros = [
            torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        positional, by_name = pytree.tree_unflatten(zeros, structure)
        try:
            func(*positional, **by_name)
        except Exception as error:
            if _REFUSED in str(error):
                raise UnsupportedOperatorError(
                    f"forward calls {getattr(func, '__name__', func)} with {numbers[0]}, which "
                    f"eager PyTorch refuses: {error}"
                ) from error


def _exceeds(number: int | float, dtype: torch.dtype) -> bool:
    """Whether ``number`` is beyond the range of ``dtype``."""
    if dtype.is_complex or dtype is torch.bool:
        return False
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return not limits.min <= number <= limits.max
