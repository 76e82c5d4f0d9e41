"""The description, in plain JSON, that the cache stores beside each shared library.

A file of the cache may be damaged or written by hand and still have a correct checksum. Every value
is therefore checked when it is read; an invalid value makes a cache miss.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from tvmbridge.compiler.buffers import Reuse
from tvmbridge.compiler.build import Code
from tvmbridge.core.types import PassRecord
from tvmbridge.kernels.keys import may_be_key_of
from tvmbridge.records import Coverage
from tvmbridge.records.tasks import Task, parse_workload

_T = TypeVar("_T")
# The fields of these classes have only types that ``_FIELDS`` lists.
_Made = TypeVar("_Made", Coverage, PassRecord, Reuse)


def description_of(
    code: Code, missing: Mapping[Task, int], passes: list[PassRecord], library: bytes
) -> dict[str, Any]:
    """Return the description of ``code``.

    Args:
        missing: the untuned tasks to store, with the number of calls of each.
    """
    return {
        "library": hashlib.sha256(library).hexdigest(),
        "unaligned": {name: list(flags) for name, flags in code.unaligned.items()},
        "shared": {name: sorted(numbers) for name, numbers in code.shared.items()},
        "coverage": asdict(code.coverage),
        "missing": [[task.workload[1], count] for task, count in missing.items()],
        "keys": dict(code.keys),
        "reuse": {name: asdict(reuse) for name, reuse in code.reuse.items()},
        "least": list(code.least),
        "most": list(code.most),
        "passes": [asdict(record) for record in passes],
    }


def described(content: Mapping[str, Any], library: bytes) -> tuple[Code, list[PassRecord]]:
    """Return the code (without its executable) and the pass records that ``content`` describes.

    Raises:
        ValueError, KeyError: ``content`` does not describe ``library``, or a value is invalid.
    """
    if content["library"] != hashlib.sha256(library).hexdigest():
        raise ValueError("it describes another library")
    unaligned = _mapping(content["unaligned"], lambda v: tuple(_list(v, _flag)))
    shared = _mapping(content["shared"], lambda v: frozenset(_list(v, _count)))
    pairs = _list(content["missing"], lambda pair: _pair(_list(pair, lambda v: v)))
    missing = {parse_workload(workload): count for workload, count in pairs}
    keys = _mapping(content["keys"], _text)
    for key, spec in keys.items():
        if not may_be_key_of(key, spec):
            raise ValueError(f"{key!r} is not the key of its spec")
    coverage = _made(Coverage, content["coverage"])
    passes = _list(content["passes"], lambda v: _made(PassRecord, v))
    reuse = _mapping(content["reuse"], lambda v: _made(Reuse, v))
    least, most = (tuple(_list(content[name], _count)) for name in ("least", "most"))
    return Code(None, unaligned, shared, coverage, missing, keys, reuse, least, most), passes


def _made(kind: type[_Made], content: Any) -> _Made:
    """Return an instance of the dataclass ``kind``, after checking the types of its fields."""
    if not isinstance(content, dict) or set(content) != {f.name for f in fields(kind)}:
        raise ValueError(f"it is no {kind.__name__}")
    return kind(**{f.name: _FIELDS[str(f.type)](content[f.name]) for f in fields(kind)})


def _mapping(content: Any, value: Callable[[Any], _T]) -> dict[str, _T]:
    if not isinstance(content, dict):
        raise ValueError("it is no object")
    return {name: value(each) for name, each in content.items()}


def _list(content: Any, value: Callable[[Any], _T]) -> list[_T]:
    if not isinstance(content, list):
        raise ValueError("it is no list")
    return [value(each) for each in content]


def _pair(content: list[Any]) -> tuple[str, int]:
    workload, count = content
    return _text(workload), _count(count)


def _flag(content: Any) -> bool:
    if type(content) is not bool:
        raise ValueError("it is no truth value")
    return content


def _integer(content: Any) -> int:
    if type(content) is not int:
        raise ValueError("it is no integer")
    return content


def _count(content: Any) -> int:
    if _integer(content) < 0:
        raise ValueError("it is negative")
    return int(content)


def _number(content: Any) -> float:
    if type(content) not in (int, float) or not math.isfinite(content):
        raise ValueError("it is no finite number")
    return float(content)


def _text(content: Any) -> str:
    if type(content) is not str:
        raise ValueError("it is no text")
    return content


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "bool": _flag,
    "int": _integer,
    "float": _number,
    "str": _text,
    "tuple[str, ...]": lambda content: tuple(_list(content, _text)),
}
