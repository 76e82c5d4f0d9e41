"""Describe values, functions and classes by digests that are equal in two processes.

Two values have the same digest only if forward cannot tell them apart: constants by type and value,
containers and plain objects by their contents, functions by their code, defaults and closures,
classes by their functions and data. What has no such description raises UndescribableError.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import enum
import functools
import importlib
import itertools
import logging
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tvmbridge.calls.patches import code_of
from tvmbridge.core.contents import ANY_TENSOR, MISSING, PartOf, attributes_of, holds_all_in_dict
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.states import StateOf
from tvmbridge.core.torch_private import OpOverload, OpOverloadPacket
from tvmbridge.graph_capture.observe.data import is_of_users
from tvmbridge.graph_capture.observe.executed import is_library
from tvmbridge.recall.digests import (
    constant_text,
    content_of,
    digest_of_parts,
    varies,
    version_of,
)
from tvmbridge.recall.spaces import functions_beside

_CONSTANTS = (bool, int, float, complex, str, bytes, range, type(None), type(...))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_CODE_LESS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_OPERATORS = (OpOverload, OpOverloadPacket)
# Entries of a class that hold no behavior of instances, or that repeat another entry.
_UNREAD = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"}
    | {"__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__orig_bases__"}
    | {
        "__slotnames__",
        "__parameters__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotate__",
    }
    | {"__annotations_cache__", "__annotate_func__", "__match_args__", "__type_params__"}
)
_NUMBERS: tuple[type[Any], ...] = (int, float, complex, str, bytes)
_HEAP_TYPE = 1 << 9  # set for the classes that are not written in C
_CONTAINERS = (collections.OrderedDict, dict, tuple, list, collections.deque)

_DEEPEST = 40

# The digests of code objects, which never change.
_CODES = WeakIdKeyDictionary()
_LARGEST_ARRAY = 2**20


class UndescribableError(BridgeError):
    """A value cannot be described as data; the message names it."""


class Describer:
    """Returns digests of values; each object is described once.

    - ``functions``: the Python functions described so far, by the digest of their code.
    - ``opaque``: for code whose defaults or closure cannot be described, the reason, by digest.

    Args:
        module: the module; it, its submodules and its tensors are described by their names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.functions: dict[str, list[types.FunctionType]] = {}
        self.opaque: dict[str, str] = {}
        self._names: dict[int, str] = {}
        for name, each in module.named_modules():
            self._names[id(each)] = f"module {name}"
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._names[id(tensor)] = f"tensor {name}"
        # By id: an object, which keeps its id in use, and its digest; None while it is described.
        self._known: dict[int, tuple[Any, str | None]] = {}
        self._spaces: dict[str, str] = {}
        self._orders: dict[str, set[str]] = {}
        self._depth = 0

    def of(self, value: Any) -> str:
        """Return the digest of ``value``.

        Raises:
            UndescribableError: ``value``, or something that it holds, cannot be described.
        """
        kind = type(value)
        if kind in _CONSTANTS or kind in _OF_TORCH:
            return f"{kind.__name__} {value!r}"
        named = self._names.get(id(value))
        if named is not None:
            return named
        known = self._known.get(id(value))
        if known is not None:
            return known[1] or f"within {kind.__qualname__}"
        if self._depth > _DEEPEST:
            raise UndescribableError(f"a {kind.__qualname__} is nested too deep")
        self._known[id(value)] = value, None
        self._depth += 1
        try:
            digest = digest_of_parts(self._described(value))
        except BaseException:
            del self._known[id(value)]
            raise
        finally:
            self._depth -= 1
        self._known[id(value)] = value, digest
        return digest

    def named(self, name: str, value: Any) -> str:
        """Return the digest of a value that code reads by ``name``; see :meth:`orders`."""
        if type(value) not in (set, frozenset):
            return self.of(value)
        items = [self.of(each) for each in value]
        self._orders.setdefault(name, set()).add(digest_of_parts(items))
        return digest_of_parts([type(value).__name__, *sorted(items)])

    def orders(self, used: Collection[str] | None) -> list[str]:
        """Return the orders of the sets with the names ``used`` (None: all) that were described."""
        names = [n for n in self._orders if used is None or n in used]
        return [f"order of {name} {sorted(self._orders[name])}" for name in names]

    def code(self, code: types.CodeType) -> str:
        """Return the digest of a code object, with the code objects in it, without its lines."""
        digest: str | None = _CODES.get(code)
        if digest is None:
            digest = _CODES[code] = digest_of_parts(self._parts_of_code(code))
        return digest

    def _parts_of_code(self, code: types.CodeType) -> list[str]:
        constants = [
            self.code(each) if isinstance(each, types.CodeType) else constant_text(each)
            for each in code.co_consts
        ]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        caught = getattr(code, "co_exceptiontable", b"")
        return [code.co_name, code.co_code.hex(), caught.hex(), repr((names, counts)), *constants]

    def _described(self, value: Any) -> list[str]:
        kind = type(value)
        if value is MISSING or value is ANY_TENSOR:
            return ["mark", value.name]
        for classes, describe in _KINDS:
            if isinstance(value, classes):
                return describe(self, value)
        if kind.__module__ == "typing":
            return ["typing", repr(value)]
        name = str(getattr(value, "__name__", ""))
        if kind.__module__ == "numpy" and vars(numpy).get(name) is value:
            return ["of numpy", name, version_of("numpy")]
        if isinstance(value, torch.Tensor):
            raise UndescribableError("a tensor outside of the module")
        written_in_c = [c for c in kind.__mro__ if not c.__flags__ & _HEAP_TYPE and c is not object]
        base: Any = next((c for c in _NUMBERS if issubclass(kind, c)), None)
        # Objects of a class that is written in C may have state that is no attribute.
        plain = _is_known(kind) and all(c is base for c in written_in_c)
        if not plain and kind is not types.SimpleNamespace:
            raise UndescribableError(f"a {kind.__module__}.{kind.__qualname__}")
        own = [] if base is None else [base.__repr__(value)]
        return ["object", self.of(kind), *own, *self._attributes(attributes_of(value))]

    def _attributes(self, held: Mapping[str, Any]) -> list[str]:
        return [each for n, v in held.items() for each in (self.of(n), self.named(n, v))]

    def _container(self, value: Any) -> list[str]:
        kind = type(value)
        plain = kind in (tuple, list, dict, set, frozenset)
        head = [kind.__name__ if plain else self.of(kind)]
        if isinstance(value, set | frozenset):
            head += [self.of(each) for each in value]  # Forward may depend on their order.
        else:
            # A subclass may iterate in its own way, such as a mapping that imports its values.
            base: Any = next((c for c in _CONTAINERS if isinstance(value, c)), kind)
            pairs = isinstance(value, Mapping)
            given = itertools.chain(*base.items(value)) if pairs else base.__iter__(value)
            head += [self.of(each) for each in list(given)]
        return head if plain else [*head, "attributes", *self._attributes(attributes_of(value))]

    def _part(self, part: PartOf) -> list[str]:
        return ["part", self.of(part.kind), str(part.asks), *self._attributes(part.attributes)]

    def _function(self, function: types.FunctionType) -> list[str]:
        code = self.code(code_of(function))
        self.functions.setdefault(code, []).append(function)
        module = str(function.__module__)
        _refuse_varying(module, function.__qualname__)
        parts = ["function", module, version_of(module), function.__qualname__, code]
        parts.append(self._beside(module))
        cells = [content_of(cell) for cell in function.__closure__ or ()]
        before = set(self.functions)
        # torch.compile leaves marks with addresses.
        own = {n: v for n, v in vars(function).items() if not n.startswith("_torchdynamo")}
        for each in (function.__defaults__, function.__kwdefaults__, own, *cells):
            try:
                parts.append(self.of(each))
            except UndescribableError as error:
                self.opaque[code] = f"{function.__qualname__} holds {error}"
                parts.append("opaque")
        if code in self.opaque and is_library(function.__globals__.get("__name__")):
            # A walk does not meet the code of a library's wrapper, but the code that it wraps.
            wrapped = [getattr(cell, "__func__", cell) for cell in cells]
            inner = {self.code(code_of(w)) for w in wrapped if isinstance(w, types.FunctionType)}
            for each in inner | (self.functions.keys() - before):
                self.opaque.setdefault(each, self.opaque[code])
        return parts

    def _beside(self, module: str) -> str:
        """Return the digest of the functions beside one of PyTorch, which may be replaced."""
        if module not in self._spaces:
            self._spaces[module] = digest_of_parts(sorted(functions_beside(module, self.code)))
        return self._spaces[module]

    def _class(self, kind: type) -> list[str]:
        parts = ["class", kind.__module__, kind.__qualname__, version_of(kind.__module__)]
        if isinstance(kind, abc.ABCMeta):
            parts += _registered(kind)
        if not (is_of_users(kind) or issubclass(kind, nn.Module)):
            return [*parts, self._beside(kind.__module__)]
        parts += [self.of(base) for base in kind.__bases__]
        if type(kind) is not type:
            parts.append(self.of(type(kind)))
        for name, value in vars(kind).items():
            if name in _UNREAD:
                continue
            try:
                parts += [name, self.named(name, value)]
            except UndescribableError:
                # Class attributes that forward reads are described apart, by their places.
                parts.append(f"opaque {type(value).__qualname__}")
        return parts

    def _method(self, method: types.MethodType) -> list[str]:
        return ["method", self.of(method.__func__), self.of(method.__self__)]

    def _wrapper(self, value: Any) -> list[str]:
        name = type(value).__name__
        if isinstance(value, property):
            held: list[Any] = [value.fget, value.fset, value.fdel]
        elif isinstance(value, functools.partial):
            held = [value.func, value.args, value.keywords]
        elif isinstance(value, functools.cached_property):
            held = [value.func]
        elif isinstance(value, functools._lru_cache_wrapper):
            held = [value.__wrapped__]
        else:
            held = [value.__func__]
        return [name, *map(self.of, held)]

    def _enum(self, value: enum.Enum) -> list[str]:
        kind = type(value)
        return ["enum", self.of(kind), value.name, self.of(value.value)]

    def _scalar(self, value: Any) -> list[str]:
        return ["scalar", value.dtype.str, value.tobytes().hex()]

    def _array(self, value: Any) -> list[str]:
        if value.dtype.hasobject or value.nbytes > _LARGEST_ARRAY:
            raise UndescribableError("a large array of numpy, or one of objects")
        return ["array", value.dtype.str, repr(value.shape), value.tobytes().hex()]

    def _context(self, value: contextvars.ContextVar[Any]) -> list[str]:
        try:
            held = value.get()
        except LookupError:  # it has neither a value nor a default
            held = MISSING
        return ["variable", value.name, self.of(held)]


def _registered(kind: abc.ABCMeta) -> list[str]:
    """Return the names of the users' classes that ``isinstance`` takes for subclasses.

    A class may be registered with ``kind``, or with a user's class below it.
    """
    dump: Any = importlib.import_module("_abc")._get_dump
    waiting: list[type] = [kind]
    met, found = set[type](), set[str]()
    while waiting:
        each = waiting.pop()
        if each in met:
            continue
        met.add(each)
        waiting += type.__subclasses__(each) if is_of_users(each) else ()
        dumped = dump(each)[0] if isinstance(each, abc.ABCMeta) else ()
        new = [c for c in (reference() for reference in dumped) if c is not None and is_of_users(c)]
        waiting += new
        found |= {f"registered {c.__module__}.{c.__qualname__}" for c in new}
    return sorted(found)


def _is_known(kind: type) -> bool:
    """Whether objects of ``kind`` keep their state where attributes show it."""
    return is_of_users(kind) or (holds_all_in_dict(kind) and kind.__name__ != "_Environ")


def _refuse_varying(module: str, name: str) -> None:
    of_environment = module == "os" and (name == "getenv" or "environ" in name.lower())
    if varies(module) and not of_environment:  # Guards compare all environment variables.
        raise UndescribableError(f"{module}.{name}, which may return something else each time")


def _builtin(describer: Describer, value: Any) -> list[str]:
    owner = getattr(value, "__self__", None)
    module = getattr(value, "__module__", None) or getattr(value, "__objclass__", owner)
    module = module if isinstance(module, str) else str(getattr(module, "__module__", "") or "")
    name = getattr(value, "__qualname__", None) or value.__name__
    _refuse_varying(module, str(name))
    version = version_of(module)
    top = module.partition(".")[0]
    if not version and top and top not in sys.stdlib_module_names:
        raise UndescribableError(f"{module}.{name}, which is written in C and has no version")
    bound = owner is not None and not isinstance(owner, type | types.ModuleType)
    return ["builtin", module, str(name), version, *([describer.of(owner)] if bound else [])]


def _operator(_: Describer, value: Any) -> list[str]:
    return ["operator", str(value)]


def _logger(_: Describer, value: logging.Logger) -> list[str]:
    levels = (value.getEffectiveLevel(), value.manager.disable, value.disabled)
    return ["logger", value.name, repr(levels)]


def _state(describer: Describer, value: StateOf) -> list[str]:
    return ["state", value.kind.__module__, value.kind.__qualname__, describer.of(value.state)]


def _pattern(_: Describer, value: re.Pattern[Any]) -> list[str]:
    return ["pattern", repr(value.pattern), str(value.flags)]


def _module(_: Describer, value: types.ModuleType) -> list[str]:
    return ["python module", value.__name__, version_of(value.__name__)]


def _typing(_: Describer, value: Any) -> list[str]:
    return ["typing", repr(value)]


_KINDS: tuple[tuple[Any, Callable[[Describer, Any], list[str]]], ...] = (
    (types.FunctionType, Describer._function),
    (PartOf, Describer._part),
    (StateOf, _state),
    (types.GenericAlias | types.UnionType | typing.TypeVar, _typing),
    (type, Describer._class),
    (types.ModuleType, _module),
    (types.MethodType, Describer._method),
    (
        property
        | staticmethod
        | classmethod
        | functools.partial
        | functools.cached_property
        | functools._lru_cache_wrapper,
        Describer._wrapper,
    ),
    (_CODE_LESS, _builtin),
    (_OPERATORS, _operator),
    (enum.Enum, Describer._enum),
    (logging.Logger, _logger),
    (re.Pattern, _pattern),
    (contextvars.ContextVar, Describer._context),
    (numpy.ndarray, Describer._array),
    (numpy.generic, Describer._scalar),
    (Mapping | tuple | list | set | frozenset | collections.deque, Describer._container),
)
