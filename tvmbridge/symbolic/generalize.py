"""Generalize Relax and TIR modules that differ only in numbers to one module with symbolic sizes.

Before, at (2, 5) and (3, 7)::

    x: R.Tensor((10, 4))        x: R.Tensor((21, 4))
    for i in range(10): ...     for i in range(21): ...

After::

    x: R.Tensor((b * s, 4)), sizes: R.Shape([b, s])
    for i in range(b * s): ...

The modules are compared node by node, by reflection. The only differences allowed are numbers for
which :class:`~.sizes.Sizes` finds a function of the symbols; any other difference is an error. The
comparison works for all kinds of nodes, so no earlier pass needs to support symbols.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm_ffi.serialization import from_json_graph_str

from tvmbridge.symbolic.attach import attach_sizes
from tvmbridge.symbolic.floats import float_of_sizes
from tvmbridge.symbolic.size import Size
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes
from tvmbridge.symbolic.specs import generalize_spec

SYMBOL = "tvmbridge_size_"
_UNUSED = "unused_size_"

_SCOPES = ("tirx.PrimFunc", "relax.expr.Function")
# Compared by identity, across all functions of a module.
_GLOBAL = "ir.GlobalVar"
_VARIABLES = ("ir.Var", "relax.expr.Var", "relax.expr.DataflowVar")


def generalize(mods: Sequence[tvm.IRModule], sizes: Sizes) -> tvm.IRModule:
    """Return the symbolic module that equals each of ``mods`` at its point of ``sizes``.

    Each TIR function that contains sizes takes the symbols as integer parameters between its inputs
    and its results. Each Relax function takes them as its last parameter, a shape.

    Raises:
        DifferentCodeError: the modules differ in more than sizes.
    """
    graphs = [json.loads(tvm.ir.save_json(mod)) for mod in mods]
    with _deep_recursion():
        merged = _Merger([g["nodes"] for g in graphs], sizes)
        root = merged.run([g["root_index"] for g in graphs])
    first = graphs[0]
    whole = {**first, "nodes": merged.nodes, "root_index": root}
    return attach_sizes(from_json_graph_str(json.dumps(whole)), sizes.symbols, SYMBOL)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class _Merger:
    """Walks the nodes of several serialized modules together, and writes the nodes of one."""

    def __init__(self, graphs: list[list[Any]], sizes: Sizes) -> None:
        self.nodes: list[Any] = []
        self._graphs = graphs
        self._sizes = sizes
        self._everywhere: dict[tuple[int, ...], int] = {}
        self._here = self._everywhere
        self._symbols: dict[str, int] = {}
        # The nodes of numbers that differ, by their type, dtype and values, within a function.
        self._numbers: dict[Any, int] = {}
        self._prefix = SYMBOL
        self._partners: dict[int, tuple[int, ...]] = {}
        self._extents_found = False

    def run(self, roots: list[int]) -> int:
        """Merge the modules, and return the number of the root among :attr:`nodes`."""
        self._find_polynomials()
        return self._merge(tuple(roots))

    def _find_polynomials(self) -> None:
        """Find all polynomials first, since quotients are quotients of known polynomials."""
        for values in self._differing:
            self._sizes.find(values)

    @functools.cached_property
    def _differing(self) -> list[tuple[int, ...]]:
        """Return the values of integers that differ between the graphs.

        It suffices to compare nodes with the same number, before the graphs are walked.
        """
        found = dict.fromkeys(
            tuple(n["data"] for n in nodes)
            for nodes in zip(*self._graphs, strict=False)
            if all(n["type"] == "int" for n in nodes)
        )
        return [values for values in found if len(set(values)) > 1]

    def _size(self, values: tuple[int, ...]) -> Size | None:
        """Return the size that a number is; look for further extents if none is found.

        An extent that a stride leaves, plus the rows of padding, may stand before the extent.
        """
        size = self._sizes.find_divided(values)
        if size is None and not self._extents_found:
            self._extents_found = True
            for each in self._differing:
                self._sizes.find_divided(each)
            size = self._sizes.find_divided(values)
        return size

    def _merge(self, at: tuple[int, ...]) -> int:
        known = self._here.get(at)
        if known is None:
            known = self._everywhere.get(at)
        if known is not None:
            return known
        nodes = [graph[i] for graph, i in zip(self._graphs, at, strict=True)]
        kind = nodes[0]["type"]
        kinds = {n["type"] for n in nodes}
        if len(kinds) > 1:
            raise DifferentCodeError(f"{sorted(kinds)} stand for each other")
        if kind in _VARIABLES:
            self._pair(at)
        if kind in _SCOPES or kind == _GLOBAL:
            outer = self._here, self._symbols, self._numbers, self._prefix
            # A GlobalVar has its function's type, which changes when the function gets symbols.
            self._here, self._symbols, self._numbers = {}, {}, {}
            self._prefix = _UNUSED if kind == _GLOBAL else SYMBOL
            number = self._merged(kind, nodes)
            self._here, self._symbols, self._numbers, self._prefix = outer
        else:
            number = self._merged(kind, nodes)
        (self._everywhere if kind == _GLOBAL else self._here)[at] = number
        return number

    def _pair(self, at: tuple[int, ...]) -> None:
        """Raise if two variables of one module correspond to one variable of another."""
        if self._partners.setdefault(at[0], at) != at:
            raise DifferentCodeError("variables are used in another way")

    def _merged(self, kind: str, nodes: list[Any]) -> int:
        if kind in ("ir.IntImm", "ir.FloatImm"):
            number = self._number(kind, nodes)
            if number is not None:
                return number
        data = [n.get("data") for n in nodes]
        first = data[0]
        if isinstance(first, dict):
            keys = first.keys()
            if any(d.keys() != keys for d in data):
                raise DifferentCodeError(f"a {kind} has other fields")
            plain = plain_fields(kind)
            named = ["name"] if kind in _VARIABLES else []
            merged: Any = {
                # A function that several calls share has the names of the first of them.
                key: self._add(self._graphs[0][first[key]])
                if key in named
                else self._field(f"{kind}.{key}", [d[key] for d in data], key in plain)
                for key in first
            }
        elif isinstance(first, list):
            if any(len(d) != len(first) for d in data):
                lengths = [len(d) for d in data]
                raise DifferentCodeError(f"a list has {lengths} elements")
            merged = [self._field(kind, list(items), False) for items in zip(*data, strict=True)]
        elif any(d != first for d in data):
            if kind != "ffi.String":
                raise DifferentCodeError(f"a {kind} is {data}")
            merged = generalize_spec(data, self._sizes)
            if merged is None:
                raise DifferentCodeError(f"texts differ: {data}")
        else:
            merged = first
        return self._add({**nodes[0], "data": merged} if "data" in nodes[0] else nodes[0])

    def _field(self, name: str, values: list[Any], plain: bool) -> Any:
        if _is_index(values[0]) and not plain:
            return self._merge(tuple(values))
        first = values[0]
        # NaN differs from itself.
        if values.count(first) < len(values) and not all(v != v for v in values):
            raise DifferentCodeError(f"{name} is {values}")
        return first

    def _add(self, node: Any) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _literals(self, nodes: list[Any]) -> tuple[Any, ...]:
        fields = [n["data"]["value"] for n in nodes]
        return tuple(g[i]["data"] for g, i in zip(self._graphs, fields, strict=True))

    def _dtype(self, nodes: list[Any]) -> str:
        return str(self._graphs[0][nodes[0]["data"]["ty"]]["data"]["dtype"])

    def _number(self, kind: str, nodes: list[Any]) -> int | None:
        """Add an expression for a number that differs; return its node, or None if it is equal."""
        integers = kind == "ir.IntImm"
        values = self._literals(nodes) if integers else tuple(n["data"]["value"] for n in nodes)
        if len(set(map(repr, values))) == 1:  # NaN is not equal to itself
            return None
        dtype = self._dtype(nodes)
        key = kind, dtype, values
        if key not in self._numbers:
            number: Any = None
            if integers:
                size = self._size(values)
                number = None if size is None else size.expression(self._variables())
            else:  # such as the reciprocal of a count
                number = float_of_sizes(values, dtype, self._sizes, self._variables())
            if number is None:
                raise DifferentCodeError(f"a number is {values} at {self._sizes.points}")
            whole = "int64" if integers else "float64"
            number = number if dtype == whole else tirx.Cast(dtype, number)
            self._numbers[key] = self._graft(number)
        return self._numbers[key]

    def _variables(self) -> list[tirx.Var]:
        """Return variables for the symbols; :meth:`_graft` identifies them by name."""
        return [tirx.Var(f"{self._prefix}{i}", "int64") for i in range(self._sizes.symbols)]

    def _graft(self, expression: tirx.Expr) -> int:
        """Add the nodes of ``expression``, with the current function's variables for symbols."""
        graph = json.loads(tvm.ir.save_json(expression))
        numbers: list[int] = []
        for node in graph["nodes"]:
            numbers.append(self._grafted(node, numbers, graph["nodes"]))
        return numbers[graph["root_index"]]

    def _grafted(self, node: Any, numbers: list[int], nodes: list[Any]) -> int:
        data = node.get("data")
        plain = plain_fields(node["type"]) if isinstance(data, dict) else frozenset[str]()
        if node["type"] == "ir.Var":
            name = nodes[data["name"]]["data"]
            if name in self._symbols:
                return self._symbols[name]
        if isinstance(data, dict):
            data = {
                k: numbers[v] if _is_index(v) and k not in plain else v for k, v in data.items()
            }
        elif isinstance(data, list):
            data = [numbers[v] if _is_index(v) else v for v in data]
        number = self._add({**node, "data": data} if "data" in node else node)
        if node["type"] == "ir.Var":
            self._symbols[name] = number
        return number


@functools.cache
def plain_fields(kind: str) -> frozenset[str]:
    """Return the fields of a TVM type whose integers are plain numbers, not references to nodes.

    Raises:
        DifferentCodeError: the type is unknown, so its fields cannot be distinguished.
    """
    info = _types().get(kind)
    if info is None:
        raise DifferentCodeError(f"the code has a {kind}, of which nothing is known")
    found = set()
    while info is not None:
        for field in info.fields:
            if json.loads(field.metadata["type_schema"])["type"] in ("int", "bool", "float"):
                found.add(field.name)
        info = info.parent_type_info
    return frozenset(found)


@functools.cache
def _types() -> dict[str, Any]:
    """Return TVM's reflection data of all types that have a Python class, by the type's name."""
    found: dict[str, Any] = {}
    pending: list[Any] = [tvm_ffi.core.Object]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        info = getattr(cls, "__tvm_ffi_type_info__", None)
        if info is not None:
            found.setdefault(info.type_key, info)
    return found


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
