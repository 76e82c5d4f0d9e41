"""The table of a run: per operator and dtype what became of it, as JSON, and its summary."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conformance.runner import Entry

# From the worst to the best: an entry is of the worst class that one of its cases is of.
CLASSES = ("crash", "wrong", "error", "refused", "aten_call", "mixed", "native")
FAILURES = frozenset({"crash", "wrong", "error"})
_UNFIT = frozenset({*FAILURES, "refused"})


class Table:
    """The results so far, written to ``path`` after each entry."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        if resume and path.exists():
            self.entries = json.loads(path.read_text(encoding="utf-8"))["entries"]

    def has(self, entry: Entry) -> bool:
        """Whether ``entry`` is in the table already."""
        return str(entry) in self.entries

    def record(self, entry: Entry, outcomes: dict[str, Any]) -> None:
        """Put the outcomes of ``entry`` in and write the file."""
        row = summarize(outcomes)
        self.entries[str(entry)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"entries": dict(sorted(self.entries.items()))}
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def failures(self) -> dict[str, dict[str, Any]]:
        """The entries of which a case is wrong, crashed or an error."""
        return {n: row for n, row in self.entries.items() if FAILURES & set(row["cases"])}

    def summary(self) -> str:
        """Counts by class and dtype, then what is wrong and what is refused."""
        dtypes = sorted({name.rpartition("/")[2] for name in self.entries})
        lines = ["dtype      " + "".join(f"{c:>10}" for c in CLASSES)]
        for dtype in dtypes:
            rows = [r for n, r in self.entries.items() if n.endswith(f"/{dtype}")]
            counts = Counter(row["class"] for row in rows)
            lines.append(f"{dtype:<11}" + "".join(f"{counts[c]:>10}" for c in CLASSES))
        for wanted in ("refused", *FAILURES):
            for name, row in self.entries.items():
                for failure in row["unfit"]:
                    if failure["result"] == wanted:
                        reason = " ".join(failure["reason"].split())[-300:]
                        lines.append(f"{wanted} {name} [{failure['label']}]: {reason}")
        return "\n".join(lines)


def summarize(outcomes: dict[str, Any]) -> dict[str, Any]:
    """One row of the table.

    Its class is the worst of its cases; but for failures those with an empty tensor do not count
    where there are others, since operators on empty tensors are always ATen calls.
    """
    listed = list(outcomes.values())
    counts = Counter(o["result"] for o in listed)
    ordinary = [o for o in listed if o["ordinary"] or o["result"] in _UNFIT] or listed
    found = {o["result"] for o in ordinary}
    return {
        "class": next((c for c in CLASSES if c in found), "none"),
        "cases": dict(counts),
        "native": sorted({name for o in listed for name in o["native"]}),
        "aten": sorted({name for o in listed for name in o["aten"]}),
        "unfit": [
            {key: o[key] for key in ("label", "result", "reason")}
            for o in listed
            if o["result"] in _UNFIT
        ],
    }
