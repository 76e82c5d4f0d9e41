"""Admission: which converters and gradient rules are proven correct, as data.

A converter or a gradient rule is a claim. It is used only for dtypes in which the conformance run
(``python -m tests.conformance --admit``) found it correct. The results of that run are in
``admitted.json``, in three sections:

- ``converters``: ATen overloads that the frontend converts; any other becomes an ATen call;
- ``rules``: Relax operators that TVM's Gradient may differentiate;
- ``derivatives``: ATen operators for which TVM's Gradient of the converted Relax code equals
  PyTorch's derivative.

An operator whose entry lacks a dtype is treated, in this dtype, as an operator without an entry.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tvmbridge.core.set_within import set_within

Section = Literal["converters", "rules", "derivatives"]
SECTIONS: tuple[Section, ...] = ("converters", "rules", "derivatives")

ADMITTED_FILE = Path(__file__).with_name("admitted.json")


@dataclass
class Usage:
    """The claims that were used during a recording.

    - ``everything``: whether all claims counted as proven during the recording.
    - ``used``: for each section, the names of the claims, each with the dtypes it was used with.
    """

    everything: bool = False
    used: dict[Section, dict[str, set[str]]] = field(default_factory=dict)


_watching: ContextVar[Usage | None] = ContextVar("tvmbridge_admission", default=None)


def recorded_uses(*, everything: bool = False) -> AbstractContextManager[Usage | None]:
    """Record the claims used within this context; with ``everything`` also use unproven claims."""
    return set_within(_watching, Usage(everything))


@functools.cache
def admitted_table() -> Mapping[Section, Mapping[str, frozenset[str]]]:
    """Return the content of ``admitted.json``: section -> name -> names of dtypes."""
    content = json.loads(ADMITTED_FILE.read_text(encoding="utf-8"))
    return {
        section: {name: frozenset(dtypes.split()) for name, dtypes in content[section].items()}
        for section in SECTIONS
    }


def is_proven(section: Section, name: str, dtypes: Iterable[str]) -> bool:
    """Whether the claim ``name`` is proven correct for all of ``dtypes``."""
    watching = _watching.get()
    if watching is not None and watching.everything:
        return True
    return admitted_table()[section].get(name, frozenset()).issuperset(dtypes)


def note_use(section: Section, name: str, dtypes: Iterable[str]) -> None:
    """Record that the claim ``name`` was used with ``dtypes``."""
    watching = _watching.get()
    if watching is not None:
        watching.used.setdefault(section, {}).setdefault(name, set()).update(dtypes)
