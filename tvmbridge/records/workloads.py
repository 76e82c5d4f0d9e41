"""Check a function in a file against an allow-list, before TVM creates objects from it.

TVM's JSON can describe any TVM object, compiled modules among them. It can also have cyclic
references, and graphs that unfold to more nodes than fit in memory. A function to be scheduled
needs few kinds of nodes, which are listed here with their fields.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tvmbridge.records.allowed import RefusedRecordError

LENGTH = struct.Struct("<Q")
MOST_NODES = 200_000
MOST_UNFOLDED = 5_000_000  # nodes of the graph as a tree: each one counts once for each path to it
DEEPEST = 400
LONGEST_NAME = 300

_BINARY = (
    *("Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "EQ", "NE", "LT"),
    *("LE", "GT", "GE", "And", "Or", "LShift", "RShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
)

# The fields of each kind of node. A field is the number of another node, unless it is in _PLAIN.
NODES: Mapping[str, frozenset[str]] = {
    kind: frozenset(fields.split())
    for kind, fields in {
        **{f"prim.{name}": "span ty a b" for name in _BINARY},
        "prim.Not": "span ty a",
        "prim.BitwiseNot": "span ty a",
        "prim.Cast": "span ty value",
        "prim.Let": "span ty var value body",
        "prim.Select": "span ty condition true_value false_value",
        "ir.Call": "span ty op args attrs ty_args",
        "ir.DictAttrs": "__dict__",
        "ir.FloatImm": "span ty value",
        "ir.GlobalVar": "span ty name_hint",
        "ir.IRModule": "functions global_var_map_ source_map attrs global_infos",
        "ir.IntImm": "span ty value",
        "ir.PrimType": "span dtype",
        "ir.Range": "min extent span",
        "ir.SourceMap": "source_map",
        "ir.TensorLoad": "span ty source indices",
        "ir.TensorRegion": "span ty source region",
        "ir.TupleType": "span fields",
        "ir.Type": "span",
        "ir.Var": "span ty name",
        "relax.FuncType": "span params ret derive_func purity",
        "relax.ShapeType": "span values ndim",
        "relax.TensorType": "span shape dtype vdevice ndim",
        "relax.expr.ShapeExpr": "span ty values",
        "s_tir.SBlock": "span iter_vars reads writes name_hint alloc_buffers match_buffers "
        "annotations init body",
        "s_tir.SBlockRealize": "span iter_values predicate block",
        "tirx.BufferRegionType": "span",
        "tirx.BufferStore": "span buffer value indices",
        "tirx.BufferType": "span dtype storage_scope shape strides elem_offset data_alignment "
        "offset_factor layout allocated_addr",
        "tirx.For": "span loop_var min extent kind body thread_binding annotations step",
        "tirx.IfThenElse": "span condition then_case else_case",
        "tirx.IterVar": "dom var iter_type thread_tag span",
        "tirx.PrimFunc": "span ty attrs params ret_type body",
        "tirx.SeqStmt": "span seq",
    }.items()
}

# Fields that are plain numbers, with the allowed values.
_PLAIN: Mapping[str, range] = {
    "ndim": range(65),
    "kind": range(2),  # serial and parallel loops
    "iter_type": range(4),
    "data_alignment": range(1, 257),
    "offset_factor": range(257),
}
_NULLABLE = "span attrs derive_func vdevice init step thread_binding layout else_case"
_MAY_BE_NONE = frozenset(_NULLABLE.split())
# The keys that attributes and other maps may have.
_MAP_KEYS = frozenset({"global_symbol", "tirx.noalias", "s_tir", "main"})
_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|void|handle")
_STRINGS = re.compile(rf"[ -~]{{0,{LONGEST_NAME}}}")
_WORDS: Mapping[str, frozenset[str]] = {
    "storage_scope": frozenset({"", "global"}),
    "thread_tag": frozenset({""}),
}
_ARITHMETIC = """
    prim.if_then_else tirx.acos tirx.acosh tirx.asin tirx.asinh tirx.atan tirx.atan2 tirx.atanh
    tirx.bitwise_and tirx.bitwise_not tirx.bitwise_or tirx.bitwise_xor tirx.ceil tirx.clz
    tirx.copysign tirx.cos tirx.cosh tirx.erf tirx.exp tirx.exp10 tirx.exp2 tirx.fabs tirx.floor
    tirx.fma tirx.fmod tirx.hypot tirx.if_then_else tirx.isfinite tirx.isinf tirx.isnan tirx.ldexp
    tirx.likely tirx.log tirx.log10 tirx.log1p tirx.log2 tirx.nearbyint tirx.nextafter
    tirx.popcount tirx.pow tirx.reinterpret tirx.round tirx.rsqrt tirx.shift_left
    tirx.shift_right tirx.sigmoid tirx.sin tirx.sinh tirx.sqrt tirx.tan tirx.tanh tirx.trunc
"""
OPERATORS = frozenset(_ARITHMETIC.split())


def checked_workload(encoded: str) -> str:
    """Decode the text of a workload in MetaSchedule's files, and return the module's JSON.

    Raises:
        RefusedRecordError: the text is damaged, or has content that is not on the allow-list.
    """
    try:
        raw = base64.b64decode(encoded, validate=True)[LENGTH.size :]
        graph = json.loads(raw)
        reason = _graph_refusal(graph)
    except (binascii.Error, ValueError, RecursionError) as error:
        raise RefusedRecordError(f"it is damaged: {error}") from None
    if reason is not None:
        raise RefusedRecordError(reason)
    return json.dumps(graph)


def _graph_refusal(graph: Any) -> str | None:
    if not (isinstance(graph, dict) and graph.keys() == {"root_index", "nodes", "metadata"}):
        return "it is no graph of TVM's"
    nodes, root = graph["nodes"], graph["root_index"]
    if not isinstance(nodes, list) or not 0 < len(nodes) <= MOST_NODES:
        return f"it has no list of at most {MOST_NODES} nodes"
    depths: list[int] = []
    sizes: list[int] = []
    for number, node in enumerate(nodes):
        found = _references(node, nodes, number)
        if isinstance(found, str):
            return f"node {number}: {found}"
        depths.append(1 + max((depths[r] for r in found), default=0))
        sizes.append(1 + sum(sizes[r] for r in found))
        if depths[-1] > DEEPEST or sizes[-1] > MOST_UNFOLDED:
            return f"node {number} is nested deeper than {DEEPEST}, or unfolds to too many nodes"
    if type(root) is not int or not 0 <= root < len(nodes) or nodes[root]["type"] != "ir.IRModule":
        return "it is no module"
    metadata = graph["metadata"]
    if not isinstance(metadata, dict) or not all(map(_is_name, (*metadata, *metadata.values()))):
        return "its metadata is not the version of TVM"
    return None


def _references(node: Any, nodes: list[Any], number: int) -> list[int] | str:
    """Return the numbers of the nodes that ``node`` refers to, or why ``node`` is refused.

    A node may refer only to nodes before it, which excludes cycles.
    """
    kind = node.get("type") if isinstance(node, dict) else None
    if not isinstance(kind, str):
        return "it is no node"
    content = node.get("data")
    if kind in _LEAVES:
        return [] if _LEAVES[kind](content) else f"the value {content!r:.60} of a {kind}"
    if kind in ("ffi.Array", "ffi.Map") and isinstance(content, list):
        wrong = not all(_stands_before(v, nodes, number) for v in content)
        if kind == "ffi.Map" and not wrong:
            wrong = len(content) % 2 == 1 or not all(_is_key(nodes[v]) for v in content[::2])
        return f"a {kind} with what it may not hold" if wrong else content
    if kind not in NODES:
        return f"the kind {kind!r:.60} is not allowed"
    if not isinstance(content, dict) or content.keys() != NODES[kind]:
        return f"a {kind} with other fields"
    references: list[int] = []
    for name, value in content.items():
        if not _is_field(kind, name, value, nodes, number):
            return f"the field {name} of a {kind}: {value!r:.60}"
        if type(value) is int and name not in _PLAIN and (kind, name) != ("ir.FloatImm", "value"):
            references.append(value)
    return references


def _is_field(kind: str, name: str, value: Any, nodes: list[Any], number: int) -> bool:
    if name in _PLAIN:
        return type(value) is int and value in _PLAIN[name]
    if (kind, name) == ("ir.FloatImm", "value"):
        return type(value) is float or (type(value) is int and abs(value) < 2**53)
    if (kind, name) == ("ir.PrimType", "dtype"):
        return isinstance(value, str) and _DTYPES.fullmatch(value) is not None
    if name == "purity":
        return isinstance(value, bool)
    if not _stands_before(value, nodes, number, nullable=name in _MAY_BE_NONE):
        return False
    if name in _WORDS:
        return _is_name(nodes[value].get("data")) and nodes[value]["data"] in _WORDS[name]
    return (kind, name) != ("ir.Call", "op") or nodes[value]["type"] == "ir.Op"


def _stands_before(value: Any, nodes: list[Any], number: int, nullable: bool = False) -> bool:
    if type(value) is not int or not 0 <= value < number:
        return False
    return nullable or nodes[value]["type"] != "None"


def _is_key(node: Any) -> bool:
    if node["type"] == "ir.GlobalVar":
        return True
    return node["type"] == "ffi.String" and node["data"] in _MAP_KEYS


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _STRINGS.fullmatch(value) is not None


_LEAVES: Mapping[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int and -(2**63) <= value < 2**63,
    "float": lambda value: type(value) is float and math.isfinite(value),
    "ffi.String": _is_name,
    "ir.Op": lambda value: isinstance(value, str) and value in OPERATORS,
}
