"""Parts of torch.export that take the square of the number of parameters, in linear time.

They look each parameter up in a dictionary that is built anew for every look-up, or compare it by a
regular expression with every submodule.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.export.exported_program

from tvmbridge.core.torch_private import export_trace
from tvmbridge.graph_capture.trace.patches import patched_here


@contextmanager
def export_in_linear_time() -> Iterator[None]:
    """Within it torch.export and decompositions do the same in less time, for this thread."""
    metadata = "_populate_param_buffer_metadata_to_new_gm"
    with ExitStack() as stack:
        for owner in (export_trace(), torch.export.exported_program):
            stack.enter_context(patched_here(owner, metadata, _with_metadata))
        # The attribute of torch.export is a function of this name.
        unflatten = importlib.import_module("torch.export.unflatten")
        stack.enter_context(patched_here(unflatten, "_is_call_name", _begins_alike))
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


def _begins_alike(genuine: Callable[..., bool], call_name: str, base: str) -> bool:
    """Whether ``call_name`` is ``base``, or ``base@2`` and so on."""
    return call_name.startswith(base) and genuine(call_name, base)
