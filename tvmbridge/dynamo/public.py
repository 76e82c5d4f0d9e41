"""``tvmbridge.compile``: torch.compile with this backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tvmbridge.dynamo.backend import BackendOptions, tvmbridge

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compile(
    model: Compiled, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any
) -> Compiled:
    """``torch.compile(model, backend="tvmbridge", ...)``.

    Args:
        model: a module or a function.
        fullgraph: raise where Dynamo cannot capture it as one graph.
        dynamic: whether sizes are symbols from the start (True), never (False), or once they
            change (None).
        options: fields of :class:`CompileOptions`, and ``smallest_graph``: graphs of fewer
            operators run as they are.

    Returns:
        what torch.compile returns.

    Raises:
        TypeError: an unknown option.
        ValueError: an option has a value that is not among its choices.
    """
    BackendOptions.of(options)
    compiled: Any = torch.compile(
        model, backend=tvmbridge, fullgraph=fullgraph, dynamic=dynamic, options=options
    )
    return compiled
