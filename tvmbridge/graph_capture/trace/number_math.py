"""Functions of Python's ``math`` for traced numbers, such as the sine in a schedule of a weight."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from tvmbridge.calls.patches import patched_here
from tvmbridge.graph_capture.trace.traced_numbers import TracedNumber

_Limit = tuple[Callable[[Any, Any], bool], float]
_FINITE: tuple[_Limit, ...] = ((operator.ge, -1e300), (operator.le, 1e300))
# By the name of a function, the arguments for which Python raises no error.
_LIMITS: dict[str, tuple[_Limit, ...]] = {
    "cos": _FINITE,
    "sin": _FINITE,
    "tanh": _FINITE,
    "exp": ((operator.ge, -700.0), (operator.le, 700.0)),
    "log": ((operator.ge, 1e-300), (operator.le, 1e300)),
    "sqrt": ((operator.ge, 0.0), (operator.le, 1e300)),
}


@contextmanager
def math_traced() -> Iterator[None]:
    """Let the functions of ``math`` in this thread accept traced numbers within the context."""
    with ExitStack() as stack:
        for name in _LIMITS:
            stack.enter_context(patched_here(math, name, partial(_computed, name)))
        yield


def _computed(name: str, genuine: Callable[..., float], *args: Any) -> Any:
    number = args[0] if len(args) == 1 else None
    if type(number) is not TracedNumber:
        return genuine(*args)
    use = f"passes it to math.{name}"
    # The code serves the arguments within the limits.
    if not all(number.decided(compare, limit, use) for compare, limit in _LIMITS[name]):
        raise number.refused(f"{use} beyond its limits")
    known = number.computed
    assert known is not None  # otherwise ``decided`` has refused
    tensor = getattr(torch, name)(number.in_float64())
    result = TracedNumber(number.of, float, tensor, math.inf, number.leaves)
    result.computed = lambda given: genuine(known(given))
    return result
