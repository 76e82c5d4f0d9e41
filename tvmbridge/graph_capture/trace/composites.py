"""Shorten how ``run_decompositions`` prepares CompositeImplicitAutograd operators.

PyTorch registers a Python kernel for each of some 500 composite operators under each of two dozen
dispatch keys, and queries the dispatcher once for each operator library. For a small module this
takes longer than the rest of the capture. The kernels that a decomposition has created are kept,
and installed again by the next one. So are the two parts of its table: composite operators, and
operators that have a decomposition written in Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.export import ExportedProgram

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.torch_private import (
    DispatchKey,
    export_utils,
    exported_program,
    fake_impls,
    has_any_kernel,
    pytree,
    registered_kernels,
)

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


_SPLIT = "_split_decomp_table_to_cia_and_python_decomp"


class _Keys(list[DispatchKey]):
    """A list of dispatch keys whose iteration leaves out the keys that the thread does not use."""

    def __iter__(self) -> Iterator[DispatchKey]:
        unused: frozenset[DispatchKey] = getattr(_of_thread, "unused", frozenset())
        return (key for key in super().__iter__() if key not in unused)


_of_thread = threading.local()


@contextmanager
def composites_prepared_for(program: ExportedProgram) -> Iterator[None]:
    """Within the context, let ``run_decompositions`` register kernels for used devices alone.

    Kernels that an earlier context has registered are registered again, if nothing differs.
    """
    for name in _LISTS:
        keys = getattr(exported_program, name)
        if not isinstance(keys, _Keys):  # Other threads iterate over all keys, as before.
            setattr(exported_program, name, _Keys(keys))
    registered = tuple(registered_kernels("CompositeImplicitAutograd"))
    before: frozenset[DispatchKey] = getattr(_of_thread, "unused", frozenset())
    _of_thread.unused = _unused_keys(_devices(program))
    try:
        with (
            operators_known(registered),
            patched_here(exported_program, "_override_composite_implicit_decomp", _overridden),
            patched_here(exported_program, _SPLIT, partial(_split, registered)),
        ):
            yield
    finally:
        _of_thread.unused = before


@contextmanager
def operators_known(registered: tuple[str, ...]) -> Iterator[None]:
    """Within the context, PyTorch does not look for its composite operators again and again.

    Args:
        registered: the names of all composite operators.
    """
    _find_operators(registered)
    with (
        patched_here(export_utils, "_materialize_cpp_cia_ops", lambda genuine: None),
        patched_here(export_utils, "_check_valid_to_preserve", _may_be_preserved),
    ):
        yield


@lru_cache(maxsize=1)
def _find_operators(registered: tuple[str, ...]) -> None:
    """Let PyTorch create the Python objects of the composite operators, once for each set."""
    export_utils._materialize_cpp_cia_ops()


def _devices(program: ExportedProgram) -> set[str]:
    values = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _unused_keys(devices: set[str]) -> frozenset[DispatchKey]:
    named = {key for device, keys in _LEFT_OUT.items() if device not in devices for key in keys}
    known = devices <= {"cpu", "meta", *_LEFT_OUT}
    return frozenset({*named, *_ADDED} if known else ())


@dataclass(frozen=True)
class _Kernels:
    """The kernels that PyTorch has created for composite operators.

    - ``unused``: the dispatch keys that were left out.
    - ``decompositions``: the decomposition of each operator.
    - ``before``: the Python kernels of each operator before.
    - ``kernels``: the Python kernels of each operator within the context.
    - ``fakes``: the implementation of each operator for fake tensors that PyTorch has added.
    """

    unused: frozenset[DispatchKey]
    decompositions: Mapping[Any, Callable[..., Any]]
    before: Mapping[Any, Mapping[Any, Any]]
    kernels: Mapping[Any, Mapping[Any, Any]]
    fakes: Mapping[Any, Callable[..., Any]]

    def fit(self, decompositions: Mapping[Any, Callable[..., Any]]) -> bool:
        """Whether PyTorch would create equal kernels for ``decompositions`` now."""
        return (
            self.unused == _of_thread.unused
            and self.decompositions == decompositions
            and all(op.py_kernels == kernels for op, kernels in self.before.items())
            and self.fakes.keys() == {op for op in decompositions if op not in _FAKES}
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the kernels within the context."""
        for op, kernels in self.kernels.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
        _FAKES.update(self.fakes)
        try:
            yield
        finally:
            for op, kernels in self.before.items():
                op.py_kernels.clear()
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
                _FAKES.pop(op, None)


# Whether an operator may be preserved; an operator that has a kernel keeps its answer.
_preserved: dict[Any, bool] = {}


def _may_be_preserved(genuine: Callable[[Any], bool], op: Any) -> bool:
    found = _preserved.get(op)
    if found is None:
        found = genuine(op)
        if has_any_kernel(op.name()):
            _preserved[op] = found
    return found


@dataclass(frozen=True)
class _Split:
    """A decomposition table in two parts.

    - ``registered``: the names of all composite operators.
    - ``table``: the whole table.
    - ``composites``, ``others``: the parts, as PyTorch returns them.
    """

    registered: tuple[str, ...]
    table: Mapping[Any, Callable[..., Any]]
    composites: Mapping[Any, Callable[..., Any]]
    others: Mapping[Any, Callable[..., Any]]


_splits: list[_Split] = []


def _split(
    registered: tuple[str, ...], genuine: Callable[[Any], tuple[Any, Any]], table: dict[Any, Any]
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the parts of ``table``; PyTorch asks the dispatcher for every operator in it."""
    for kept in _splits:
        if kept.registered == registered and kept.table == table:
            return dict(kept.composites), dict(kept.others)
    whole = dict(table)
    composites, others = genuine(table)
    kept = _Split(registered, whole, dict(composites), dict(others))
    _splits[:] = [kept, *_splits][:_MOST_KEPT]
    return composites, others


# The kernels of the last decompositions: tables for inference and for training differ.
_kept: list[_Kernels] = []
_MOST_KEPT = 4
_FAKES = fake_impls.op_implementations_dict


@contextmanager
def _overridden(
    genuine: Callable[[Any], AbstractContextManager[None]],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Iterator[None]:
    """Enter PyTorch's context, which creates the kernels, or install kernels that were kept."""
    found = next((kept for kept in _kept if kept.fit(decompositions)), None)
    if found is not None:
        with found.installed():
            yield
        return
    before = {op: dict(op.py_kernels) for op in decompositions}
    added = [op for op in decompositions if op not in _FAKES]
    with genuine(decompositions):
        kernels = {op: dict(op.py_kernels) for op in decompositions}
        fakes = {op: _FAKES[op] for op in added}
        created = _Kernels(_of_thread.unused, dict(decompositions), before, kernels, fakes)
        _kept[:] = [created, *_kept][:_MOST_KEPT]
        yield
