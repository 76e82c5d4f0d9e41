"""The table of handlers: torch functions that are replaced during a trace of forward.

A handler is registered for the functions that it replaces, and is called as ``handler(call, args,
kwargs)``. In it, ``call(*args, **kwargs)`` calls the function's next handler, or the function
itself after the last handler. As in every torch-function mode, functions that a handler calls are
not handled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from tvmbridge.graph_capture.trace.numbers import refuse_out_of_range

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
            return func(*args, **named)
        return Call(func, [chain[order] for order in sorted(chain)])(*args, **named)
