"""The table of handlers: torch functions that are replaced while forward is traced.

A handler is registered for the functions that it replaces and is called ``handler(call, args,
kwargs)``; ``call(*args, **kwargs)`` goes on to the next handler of that function, and from the
last one to the function itself. As in every mode, what a handler calls is not handled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from tvmbridge.graph_capture.trace.numbers import refuse_out_of_range

Handler = Callable[["Call", tuple[Any, ...], dict[str, Any]], Any]
HandlerT = Callable[[Handler], Handler]

# Function -> its handlers by their order.
HANDLERS: dict[Any, dict[int, Handler]] = {}


@dataclass(frozen=True)
class Call:
    """A call of ``function`` with the handlers that are still to be called."""

    function: Any
    handlers: Sequence[Handler]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.handlers:
            return self.function(*args, **kwargs)
        return self.handlers[0](Call(self.function, self.handlers[1:]), args, kwargs)


def replaces(*functions: Any, order: int = 0) -> HandlerT:
    """Register the decorated handler for ``functions``.

    Args:
        functions: torch functions as ``__torch_function__`` is given them.
        order: of several handlers for one function the one with the lowest order is called first.
    """

    def enter(handler: Handler) -> Handler:
        for function in functions:
            if order in HANDLERS.setdefault(function, {}):
                raise ValueError(f"{function} has two handlers of order {order}")
            HANDLERS[function][order] = handler
        return handler

    return enter


class FunctionTable(TorchFunctionMode):
    """Within it torch functions are replaced by their handlers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        refuse_out_of_range(func, args, named)  # any function may be given a number
        chain = HANDLERS.get(func)
        if chain is None:
            return func(*args, **named)
        return Call(func, [chain[order] for order in sorted(chain)])(*args, **named)
