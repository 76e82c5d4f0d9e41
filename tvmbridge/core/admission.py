"""Admission: what has been proven right, as data.

A converter or a gradient rule is a claim. It is used for those dtypes only for which the
conformance run (``python -m tests.conformance --admit``) found it right, which is what
``admitted.json`` says, in three sections:

- ``converters``: ATen overloads that the frontend converts; any other becomes an ATen call;
- ``rules``: Relax operators that TVM's Gradient may differentiate;
- ``derivatives``: ATen operators whose derivative is that of what the frontend makes of them.

An operator with an entry that lacks a dtype is treated in this dtype as if it had none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Section = Literal["converters", "rules", "derivatives"]
SECTIONS: tuple[Section, ...] = ("converters", "rules", "derivatives")

ADMITTED_FILE = Path(__file__).with_name("admitted.json")


@dataclass
class Usage:
    """What was used while that was recorded: per section the names, and the dtypes of each.

    With ``everything`` all claims count as proven meanwhile.
    """

    everything: bool = False
    used: dict[Section, dict[str, set[str]]] = field(default_factory=dict)


_watching: ContextVar[Usage | None] = ContextVar("tvmbridge_admission", default=None)


@contextmanager
def recorded_uses(*, everything: bool = False) -> Iterator[Usage]:
    """Within it uses of claims are noted; with ``everything`` also unproven claims are used."""
    usage = Usage(everything)
    token = _watching.set(usage)
    try:
        yield usage
    finally:
        _watching.reset(token)


@functools.cache
def admitted_table() -> Mapping[Section, Mapping[str, frozenset[str]]]:
    """The content of ``admitted.json``: section -> name -> names of dtypes."""
    content = json.loads(ADMITTED_FILE.read_text(encoding="utf-8"))
    return {
        section: {name: frozenset(dtypes.split()) for name, dtypes in content[section].items()}
        for section in SECTIONS
    }


def is_proven(section: Section, name: str, dtypes: Iterable[str]) -> bool:
    """Whether the claim ``name`` has been proven right for all of ``dtypes``."""
    watching = _watching.get()
    if watching is not None and watching.everything:
        return True
    return admitted_table()[section].get(name, frozenset()).issuperset(dtypes)


def note_use(section: Section, name: str, dtypes: Iterable[str]) -> None:
    """Record that the claim ``name`` was used with ``dtypes``."""
    watching = _watching.get()
    if watching is not None:
        watching.used.setdefault(section, {}).setdefault(name, set()).update(dtypes)
