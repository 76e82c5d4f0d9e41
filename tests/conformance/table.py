"""The table of a run: the outcomes of each entry, as lines of JSON, and their summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.conformance.runner import Entry

# From the worst to the best: an entry gets the worst class of its cases.
CLASSES = ("crash", "timeout", "wrong", "error", "refused", "aten_call", "mixed", "native")
FAILURES = frozenset({"crash", "timeout", "wrong", "error"})
RIGHT = frozenset({"aten_call", "mixed", "native"})


class Table:
    """The results of a run; each finished entry is appended to the file ``path``."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = read_rows([path]) if resume else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.write_text("", encoding="utf-8")

    def has(self, entry: Entry) -> bool:
        """Whether ``entry`` is in the table already."""
        return str(entry) in self.entries

    def record(self, entry: Entry, outcomes: dict[str, Any]) -> None:
        """Add the summary of ``entry``'s outcomes, and append it to the file."""
        row = self.entries[str(entry)] = summarize(outcomes)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"entry": str(entry), **row}) + "\n")

    def failures(self) -> dict[str, dict[str, Any]]:
        """Return the entries in which a case is wrong, crashed, hung, or raised an error."""
        return {n: row for n, row in self.entries.items() if FAILURES & set(row["cases"])}


def read_rows(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the rows of several files by entry; a later row replaces an earlier one.

    An incomplete line, which a killed run leaves, is skipped.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row.pop("entry")] = row
    return rows


def summarize(outcomes: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an entry from the outcomes of its cases.

    The row's class is the worst class of its cases. A case with an empty tensor counts only if it
    is not right, since operators on empty tensors are always ATen calls.
    """
    listed = list(outcomes.values())
    counts = Counter(o["result"] for o in listed)
    ordinary = [o for o in listed if o["ordinary"] or o["result"] not in RIGHT] or listed
    found = {o["result"] for o in ordinary}
    unfit = [o for o in listed if o["result"] not in RIGHT]
    return {
        "class": next((c for c in CLASSES if c in found), "none"),
        "cases": dict(counts),
        "native": sorted({name for o in listed for name in o["native"]}),
        "aten": sorted({name for o in listed for name in o["aten"]}),
        "joint": sorted({o["joint"] for o in listed if o["joint"]}),
        "unfit": [{key: o[key] for key in ("label", "result", "reason")} for o in unfit],
        "proven": _uses(o for o in listed if o["result"] in RIGHT),
        "refuted": _uses(unfit),
    }


def _uses(outcomes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return the claims that served ``outcomes``: section -> name -> dtypes."""
    merged: dict[str, dict[str, set[str]]] = {}
    for outcome in outcomes:
        for section, names in outcome["used"].items():
            for name, dtypes in names.items():
                merged.setdefault(section, {}).setdefault(name, set()).update(dtypes)
    return {s: {n: sorted(d) for n, d in names.items()} for s, names in merged.items()}


def count_classes(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Count the entries of each class, for each dtype and mode (such as ``float32/forward``)."""
    counts: dict[str, Counter[str]] = {}
    for name, row in rows.items():
        _, dtype, mode = name.rsplit("/", 2)
        if row["class"] != "none":
            counts.setdefault(f"{dtype}/{mode}", Counter())[row["class"]] += 1
    return dict(sorted(counts.items()))


def share_right(counts: Mapping[str, int]) -> float:
    """Return the share of the entries whose class is a right one."""
    return sum(counts.get(c, 0) for c in RIGHT) / max(1, sum(counts.values()))


def describe(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return counts by class, dtype and mode as text, then each refused and each failed case."""
    lines = [f"{'':<18}" + "".join(f"{c:>10}" for c in CLASSES) + "     right"]
    for kind, counts in count_classes(rows).items():
        numbers = "".join(f"{counts[c]:>10}" for c in CLASSES)
        lines.append(f"{kind:<18}{numbers}{share_right(counts):>10.1%}")
    for wanted in ("refused", *sorted(FAILURES)):
        for name, row in rows.items():
            for failure in row["unfit"]:
                if failure["result"] == wanted:
                    reason = " ".join(failure["reason"].split())[-300:]
                    lines.append(f"{wanted} {name} [{failure['label']}]: {reason}")
    return "\n".join(lines)
