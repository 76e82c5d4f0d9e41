"""Shorten how ``run_decompositions`` prepares CompositeImplicitAutograd operators.

PyTorch registers a Python kernel for each of some 500 composite operators under each of two dozen
dispatch keys, and queries the dispatcher once for each operator library. For a small module this
takes longer than the rest of the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.export import ExportedProgram

from tvmbridge.core.torch_private import DispatchKey, export_utils, exported_program, pytree
from tvmbridge.graph_capture.trace.patches import patched_here

# The lists of dispatch keys for which PyTorch registers kernels.
_LISTS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
# The keys of a device are left out if the program has no values on it.
_LEFT_OUT = {
    "ipu": (DispatchKey.IPU, DispatchKey.AutogradIPU),
    "xla": (DispatchKey.XLA, DispatchKey.AutogradXLA),
    "lazy": (DispatchKey.Lazy, DispatchKey.AutogradLazy),
    "xpu": (DispatchKey.XPU, DispatchKey.AutogradXPU),
    "mps": (DispatchKey.MPS, DispatchKey.AutogradMPS),
    "hpu": (DispatchKey.HPU, DispatchKey.AutogradHPU),
    "cuda": (DispatchKey.CUDA, DispatchKey.AutogradCUDA),
}
# Keys of backends that extensions may add under any device name.
_ADDED = (
    DispatchKey.AutogradPrivateUse1,
    DispatchKey.AutogradPrivateUse2,
    DispatchKey.AutogradPrivateUse3,
)


class _Keys(list[DispatchKey]):
    """A list of dispatch keys whose iteration leaves out the keys that the thread does not use."""

    def __iter__(self) -> Iterator[DispatchKey]:
        unused: frozenset[DispatchKey] = getattr(_of_thread, "unused", frozenset())
        return (key for key in super().__iter__() if key not in unused)


_of_thread = threading.local()


@contextmanager
def composites_prepared_for(program: ExportedProgram) -> Iterator[None]:
    """Within the context, let ``run_decompositions`` register kernels for used devices alone."""
    for name in _LISTS:
        keys = getattr(exported_program, name)
        if not isinstance(keys, _Keys):  # Other threads iterate over all keys, as before.
            setattr(exported_program, name, _Keys(keys))
    export_utils._materialize_cpp_cia_ops()
    before: frozenset[DispatchKey] = getattr(_of_thread, "unused", frozenset())
    _of_thread.unused = _unused_keys(_devices(program))
    try:
        with patched_here(export_utils, "_materialize_cpp_cia_ops", lambda genuine: None):
            yield
    finally:
        _of_thread.unused = before


def _devices(program: ExportedProgram) -> set[str]:
    values = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _unused_keys(devices: set[str]) -> frozenset[DispatchKey]:
    named = {key for device, keys in _LEFT_OUT.items() if device not in devices for key in keys}
    known = devices <= {"cpu", "meta", *_LEFT_OUT}
    return frozenset({*named, *_ADDED} if known else ())
