"""Write ``tvmbridge/core/admitted.json`` from the rows of a conformance run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tvmbridge.core.admission import ADMITTED_FILE, SECTIONS, Section, admitted_table

Pairs = dict[Section, dict[str, set[str]]]


def _collect(rows: Mapping[str, Mapping[str, Any]], key: str) -> Pairs:
    found: Pairs = {section: {} for section in SECTIONS}
    for row in rows.values():
        for section in SECTIONS:
            for name, dtypes in row[key].get(section, {}).items():
                found[section].setdefault(name, set()).update(dtypes)
    return found


def proven_claims(rows: Mapping[str, Mapping[str, Any]]) -> Pairs:
    """Return the claims, with dtypes, that served a right case and no case that failed.

    A claim that is in the table already stays proven even if a case fails. The run then reports
    the failure, and another operator of the same case may be the cause.
    """
    proven, refuted = _collect(rows, "proven"), _collect(rows, "refuted")
    before = admitted_table()
    for section in SECTIONS:
        for name, dtypes in proven[section].items():
            new = refuted[section].get(name, set()) - before[section].get(name, frozenset())
            dtypes -= new
    return proven


def write_admitted(rows: Mapping[str, Mapping[str, Any]], *, only_add: bool) -> list[str]:
    """Write the table of admitted claims, and return a line for each change.

    Args:
        rows: the rows of the run.
        only_add: whether claims of the old table that ``rows`` do not mention are kept, as a run
            of only some entries needs.
    """
    proven, before = proven_claims(rows), admitted_table()
    changes = []
    content: dict[str, dict[str, str]] = {}
    for section in SECTIONS:
        names = proven[section]
        if only_add:
            for name, known in before[section].items():
                names.setdefault(name, set()).update(known)
        content[section] = {n: " ".join(sorted(d)) for n, d in sorted(names.items()) if d}
        for name in sorted({*names, *before[section]}):
            old, new = before[section].get(name, frozenset()), names.get(name, set())
            added, lost = sorted(new - old), sorted(old - new)
            if added or lost:
                signs = [*(f"+{d}" for d in added), *(f"-{d}" for d in lost)]
                changes.append(f"{section} {name}: {' '.join(signs)}")
    ADMITTED_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    admitted_table.cache_clear()
    return changes
