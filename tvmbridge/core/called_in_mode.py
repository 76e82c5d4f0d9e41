"""Calls in another mode of the thread, which is as it was afterwards, whatever a handler raises.

A signal handler that raises may do so on entry of ``torch.no_grad().__exit__``, which is Python
code: gradients then stay off. Python runs handlers after calls and at jumps back alone, so a
``finally`` whose first call restores the mode is reached by every exception.
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
    """Call ``function``, of which autograd records nothing."""
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
    """Call ``function``, which autograd records."""
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
    """Call ``function`` where autocast is off, as it is wherever compiled code runs."""
    if not (before := autocast_now()):
        return function(*args, **kwargs)
    device = before[0][0]
    try:
        torch.set_autocast_enabled(device, False)
        return with_autocast_off(function, *args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, True)
