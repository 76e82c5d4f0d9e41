"""Call a function in another PyTorch mode, and restore the mode even if a signal handler raises.

A signal handler may raise on entry of ``torch.no_grad().__exit__``, which is Python code: gradients
then stay off. Python runs signal handlers only after calls and at backward jumps. No handler can
therefore run between the start of a ``finally`` block and its first call, which restores the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.torch_private import set_grad_enabled

Given = ParamSpec("Given")
Result = TypeVar("Result")


def without_gradients(
    function: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Call ``function`` with gradients disabled, and return its result."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    try:
        set_grad_enabled(False)
        return function(*args, **kwargs)
    finally:
        set_grad_enabled(True)


def with_gradients(
    function: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Call ``function`` with gradients enabled, and return its result."""
    if torch.is_grad_enabled():
        return function(*args, **kwargs)
    try:
        set_grad_enabled(True)
        return function(*args, **kwargs)
    finally:
        set_grad_enabled(False)


def with_autocast_off(
    function: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Call ``function`` with autocast off, as for all compiled code, and return its result."""
    if not (before := autocast_now()):
        return function(*args, **kwargs)
    device = before[0][0]
    try:
        torch.set_autocast_enabled(device, False)
        return with_autocast_off(function, *args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, True)
