"""Record which attributes of the module forward reads and which it writes.

The numbers, strings and containers that forward reads become constants of compiled code. So reads
are recorded while forward runs on fake tensors, and ``runtime/guards`` compares the values at
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.copies import copied_values
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.contents import ANY_TENSOR, DEPTH, MISSING, all_held, deeper, is_constant
from tvmbridge.core.libraries import BOOKKEEPING
from tvmbridge.core.number_places import marked_places
from tvmbridge.core.types import Key, Left
from tvmbridge.graph_capture.observe.executed import is_called_by_library
from tvmbridge.graph_capture.observe.foreign import ForeignModules
from tvmbridge.graph_capture.observe.objects import NO_READS, ObjectReads
from tvmbridge.graph_capture.trace.left import assigned as assign

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {
    "forward",
    "_call_impl",
    "_wrapped_call_impl",
    "call_super_init",
    "dump_patches",
    "_compiled_call_impl",  # of Module.compile(): the same forward by torch.compile
}


@contextmanager
def recorded_reads(
    module: nn.Module, foreign: ForeignModules | None = None
) -> Iterator[set[tuple[str, str]]]:
    """Yield a set that collects the attributes that are read inside this context.

    An entry is (submodule's name, attribute's name). Attributes that every module has are left
    out; :func:`values_read` later drops parameters, buffers and submodules. A read of ``__dict__``
    by user code, as ``vars`` does, counts as a read of every attribute in it. Reads of modules
    outside ``module`` go to ``foreign``.
    """
    names = {id(m): name for name, m in module.named_modules(remove_duplicate=False)}
    reads: set[tuple[str, str]] = set()

    def read(genuine: Callable[..., Any], owner: nn.Module, attribute: str) -> Any:
        name = names.get(id(owner))
        if name is None and foreign is not None:
            foreign.note(owner, attribute)
        if name is None or attribute in _OF_EVERY_MODULE:
            return genuine(owner, attribute)
        if attribute == "__dict__":
            attributes: dict[str, Any] = genuine(owner, "__dict__")
            # The frames of the patch's call and stub are between this function and the reader.
            if not is_called_by_library(3):
                reads.update((name, a) for a in own_names(owner))
                reads.add((name, "__dict__"))
            return attributes
        if not attribute.startswith("__"):
            reads.add((name, attribute))
        return genuine(owner, attribute)

    with patched_here(nn.Module, "__getattribute__", read):
        yield reads


@contextmanager
def recorded_assignments(
    module: nn.Module, reads: set[tuple[str, str]], foreign: ForeignModules
) -> Iterator[set[tuple[str, str]]]:
    """Yield a set that collects the attributes that are assigned before they are read.

    Forward depends on no earlier value of such an attribute: it reads back its own value.
    """
    names = {id(m): name for name, m in module.named_modules(remove_duplicate=False)}
    assigned: set[tuple[str, str]] = set()

    def write(genuine: Callable[..., None], owner: nn.Module, attribute: str, value: Any) -> None:
        key = names.get(id(owner), ""), attribute
        if id(owner) not in names:
            foreign.note_value(owner, attribute)
        if id(owner) in names and attribute not in _OF_EVERY_MODULE and key not in reads:
            assigned.add(key)
        assign(genuine, owner, attribute, value)

    with patched_here(nn.Module, "__setattr__", write):
        yield assigned


def own_names(module: nn.Module) -> frozenset[str]:
    """Return the names in the module's ``__dict__`` that not every module has, and no dispatch."""
    return frozenset(n for n in vars(module) if n not in _OF_EVERY_MODULE)


def values_assigned(
    module: nn.Module, assigned: set[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Return the values of the ``assigned`` attributes that hold constants (numbers, strings)."""
    values: dict[tuple[str, str], Any] = {}
    for name, attribute in assigned:
        held = module.get_submodule(name).__dict__
        if attribute not in BOOKKEEPING and is_constant(held.get(attribute, MISSING)):
            values[name, attribute] = held[attribute]
    return values


def values_read(
    module: nn.Module, reads: set[tuple[str, str]], objects: ObjectReads
) -> dict[tuple[str, str], Any]:
    """Return the values that a guard expects for ``reads``; MISSING if there is no such attribute.

    Parameters, buffers and submodules are left out. Any tensor is accepted in place of a tensor,
    since tensors are inputs of the compiled code or watched constants. For plain objects, the
    value has only the attributes that ``objects`` recorded as read.
    """
    values: dict[tuple[str, str], Any] = {}
    for name, attribute in reads:
        owner = module.get_submodule(name)
        if attribute in BOOKKEEPING or any(
            attribute in d for d in (owner._parameters, owner._buffers, owner._modules)
        ):
            continue
        held = owner.__dict__.get(attribute, MISSING)
        value = own_names(owner) if attribute == "__dict__" else held
        tensor = isinstance(value, torch.Tensor)
        values[name, attribute] = ANY_TENSOR if tensor else objects.narrowed(value, value)
    return values


def with_marks_copied(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return expected values of attributes, with copies of those that have marks inside."""
    marked = {key[:2] for keys in marked_places(values).values() for key in keys if len(key) > 2}
    return {**values, **copied_values({key: values[key] for key in marked})}


def values_in_place(
    module: nn.Module,
    written: Iterable[tuple[str, str]],
    objects: ObjectReads,
    before: nn.Module,
) -> dict[tuple[str, str], Any]:
    """Return the values of ``written`` attributes as :func:`values_read` does.

    For plain objects, the value also has the attributes that differ from ``before``, the module
    in its state before forward wrote.
    """
    values: dict[tuple[str, str], Any] = {}
    for (name, attribute), value in values_read(module, set(written), NO_READS).items():
        earlier = before.get_submodule(name).__dict__.get(attribute, MISSING)
        values[name, attribute] = objects.narrowed(value, value, earlier)
    return values


def read_and_left(
    values: Mapping[tuple[str, str], Any],
    left: Mapping[tuple[str, str], Left],
    read_first: Collection[tuple[str, str]],
    foreign: Collection[int],
) -> Iterator[str]:
    """Yield a complaint for each attribute that forward writes and the next call depends on.

    Args:
        left: the attributes that forward sets at each call, and how.
        read_first: the attributes of ``left`` that forward reads before it writes them.
    """
    for key in read_first:
        value = values.get(key)
        number = left[key].into == "place" and value not in (None, MISSING) and is_constant(value)
        items = all_held(value) if left[key].into == "end" else []
        if number or _is_deep(value) or any(id(item) in foreign for item in items):
            yield f"writes {'.'.join(filter(None, key))}, which it reads"


def _is_deep(value: Any, depth: float = DEPTH) -> bool:
    """Whether plain containers are nested deeper than guards compare them."""
    if type(value) not in (tuple, list, dict) or not value:
        return False
    items = value.values() if type(value) is dict else value
    return depth <= 0 or any(_is_deep(item, deeper(value, depth)) for item in items)


def iterators_among(values: Mapping[tuple[str, str], Any]) -> Iterator[str]:
    """Yield a complaint for each iterator that forward reads, since it may advance the iterator."""
    for (path, name), value in values.items():
        if any(isinstance(held, Iterator) for held in all_held(value)):
            yield f"reads the iterator {path}.{name}".replace(" .", " ")
