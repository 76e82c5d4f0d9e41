"""Parts of torch.export that take the square of the number of parameters, in linear time.

torch.export builds a dictionary anew for every look-up of a parameter, and compares the name of
every submodule with the path of each parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.export.exported_program
from torch import nn

from tvmbridge.core.torch_private import export_trace
from tvmbridge.graph_capture.trace.patches import patched_here


@contextmanager
def export_in_linear_time() -> Iterator[None]:
    """Within it torch.export and decompositions do the same in less time, for this thread."""
    metadata = "_populate_param_buffer_metadata_to_new_gm"
    with ExitStack() as stack:
        for owner in (export_trace(), torch.export.exported_program):
            stack.enter_context(patched_here(owner, metadata, _with_metadata))
        unlift = importlib.import_module("torch.export._unlift")
        stack.enter_context(patched_here(unlift, "_assign_attr", _assigned))
        yield


def _with_metadata(
    genuine: Callable[..., None], metadata: dict[str, Any], module: Any, signature: Any
) -> None:
    """It reads two properties of the signature for each node; each builds a dictionary."""
    names = SimpleNamespace(
        inputs_to_parameters=signature.inputs_to_parameters,
        inputs_to_buffers=signature.inputs_to_buffers,
    )
    genuine(metadata, module, names)


def _assigned(
    genuine: Callable[..., None], value: Any, module: nn.Module, path: str, *args: Any, **named: Any
) -> None:
    """Assign ``value`` to ``path`` below ``module``, as the genuine function does.

    That one also looks for submodules ``name@1``, ``name@2`` beside each ``name`` of the path.
    """
    *holders, field = path.split(".")
    holder = module
    for name in holders:
        if f"{name}@1" in holder._modules:
            genuine(value, module, path, *args, **named)
            return
        if not hasattr(holder, name):
            setattr(holder, name, nn.Module())
        holder = getattr(holder, name)
    genuine(value, holder, field, *args, **named)
