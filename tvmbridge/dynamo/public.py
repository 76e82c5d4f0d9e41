"""``tvmbridge.compile``: ``torch.compile`` with this backend and its options as keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tvmbridge.dynamo.backend import BackendOptions, tvmbridge
from tvmbridge.dynamo.report import begin

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compile(
    model: Compiled, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any
) -> Compiled:
    """Compile ``model`` by ``torch.compile(model, backend="tvmbridge", options=options)``.

    Args:
        model: a module or a function.
        fullgraph: whether to raise an error if Dynamo cannot capture ``model`` as one graph.
        dynamic: whether sizes are symbols from the start (True), never (False), or once they
            change (None).
        options: fields of :class:`CompileOptions`, and ``smallest_graph``: graphs with fewer
            operators run in eager PyTorch.

    Returns:
        The module or function that ``torch.compile`` returns.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option has a value that is not among its choices.
    """
    BackendOptions.of(options)
    begin()
    compiled: Any = torch.compile(
        model, backend=tvmbridge, fullgraph=fullgraph, dynamic=dynamic, options=options
    )
    return compiled
