"""A shorter preparation of CompositeImplicitAutograd operators for ``run_decompositions``.

PyTorch registers a Python kernel for each of some 500 composite operators under each of two dozen
dispatch keys, and queries the dispatcher once for each operator library. For a small module that
takes longer than all the rest of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram

from tvmbridge.core.torch_private import DispatchKey, OperatorBase, export_utils, pytree
from tvmbridge.graph_capture.trace.patches import patched_here

# Keys are left out of devices that a program has no values on.
_LEFT_OUT = {
    "ipu": (DispatchKey.IPU, DispatchKey.AutogradIPU),
    "xla": (DispatchKey.XLA, DispatchKey.AutogradXLA),
    "lazy": (DispatchKey.Lazy, DispatchKey.AutogradLazy),
    "xpu": (DispatchKey.XPU, DispatchKey.AutogradXPU),
    "mps": (DispatchKey.MPS, DispatchKey.AutogradMPS),
    "hpu": (DispatchKey.HPU, DispatchKey.AutogradHPU),
    "cuda": (DispatchKey.CUDA, DispatchKey.AutogradCUDA),
}
# Of backends that others may add; they have any name.
_ADDED = (
    DispatchKey.AutogradPrivateUse1,
    DispatchKey.AutogradPrivateUse2,
    DispatchKey.AutogradPrivateUse3,
)


@contextmanager
def composites_prepared_for(program: ExportedProgram) -> Iterator[None]:
    """Within it ``program.run_decompositions`` registers kernels for the devices in use alone."""
    unused = _unused_keys(_devices(program))

    def py_impl(genuine: Callable[..., Any], op: Any, key: Any) -> Callable[..., Any]:
        return _same if key in unused else genuine(op, key)

    export_utils._materialize_cpp_cia_ops()
    with (
        patched_here(export_utils, "_materialize_cpp_cia_ops", lambda genuine: None),
        patched_here(OperatorBase, "py_impl", py_impl),
    ):
        yield


def _same(kernel: Any) -> Any:
    return kernel


def _devices(program: ExportedProgram) -> set[str]:
    values = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _unused_keys(devices: set[str]) -> frozenset[DispatchKey]:
    named = {key for device, keys in _LEFT_OUT.items() if device not in devices for key in keys}
    known = devices <= {"cpu", "meta", *_LEFT_OUT}
    return frozenset({*named, *_ADDED} if known else ())
