"""Operators that exchange tensors with other processes, which compiled code does not run.

All processes of a group must run their exchanges in the same order. A capture runs forward further
times, and each process compiles when it wants to, so that exchanges of two processes would be
mixed up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import TorchDispatchMode

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


def is_exchange(operator: Any) -> bool:
    """Whether an operator exchanges tensors with other processes, or waits for an exchange."""
    return getattr(operator, "namespace", None) in _NAMESPACES


def refuse_exchange(operator: Any) -> None:
    """Refuse an operator that exchanges tensors with other processes."""
    if is_exchange(operator):
        raise CaptureError(
            f"it exchanges tensors with other processes ({operator}), which compiled code does "
            "not: dispatch the submodules before and behind the exchange instead"
        )


class _NoExchanges(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_exchange(func)
        return func(*args, **(kwargs or {}))


def no_exchanges() -> AbstractContextManager[Any]:
    """Return a context in which :func:`refuse_exchange` is called for each operator.

    A process without a process group can exchange nothing, and gets an empty context.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return nullcontext()
    return _NoExchanges()  # type: ignore[no-untyped-call]
