"""Calls of custom autograd functions (``torch.autograd.Function``), noticed in this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.function import BackwardCFunction

from tvmbridge.calls.patches import patched_here


@contextmanager
def custom_functions_told(
    tell: Callable[[type[Any]], None], *, over: bool = False
) -> Iterator[None]:
    """Call ``tell`` with the class of each custom function that is applied within the context.

    It is called just before PyTorch looks up the forward of the function.

    Args:
        over: as in :func:`~tvmbridge.calls.patches.patched_here`.
    """

    def begun(genuine: Any, ctx: BackwardCFunction) -> None:
        # Each call of Function.apply, from Python or C++, creates this autograd node.
        genuine(ctx)
        tell(ctx._forward_cls)  # type: ignore[attr-defined]

    with patched_here(BackwardCFunction, "__init__", begun, over=over):
        yield
