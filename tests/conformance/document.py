"""Write ``docs/operators.md``, the class of every operator, from the kept conformance results.

``results.json`` keeps the results in brief: dtype and mode -> operator -> class, with the version
of PyTorch and the number of samples.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.coverage import left_out
from tests.conformance.table import CLASSES, share_right
from tests.conformance.usage import COUNT, is_native, most_used, read_usage
from tvmbridge.core.admission import admitted_table

RESULTS = Path(__file__).with_name("results.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"

Results = dict[str, dict[str, str]]

_HEAD = """# Operators

What PyTorch's own samples of each operator (OpInfo), and harder variants of them, become on the
whole way from `torch.export` to compiled code, compared with eager PyTorch in structure, dtype,
shape and values; and the same for gradients.

Measured with PyTorch {torch}{samples}. This page is generated:

```
python -m tests.conformance --dtypes {dtypes} --modes {modes} --out build/all.jsonl
python -m tests.conformance --read build/all.jsonl --whole --write-results
python -m tests.conformance --write-docs
```

**native**: compiled by TVM throughout. **mixed**: some of the ATen operators it consists of are
native, others calls of PyTorch's kernels. **call**: a call of PyTorch's own kernel from inside
compiled code. **refused**: a case of it is refused with a reason, and the module keeps its own
forward. An operator is in the worst of the classes of its cases. An empty field: PyTorch does not
have the operator in this dtype.
"""
_WORDS = {"aten_call": "call"}


@dataclass(frozen=True)
class Measured:
    """Results, the version of PyTorch, and the limit of samples of an entry (0: no limit)."""

    results: Results
    torch: str
    samples: int


def read_results() -> Measured:
    """Return the content of ``results.json``."""
    return Measured(**json.loads(RESULTS.read_text(encoding="utf-8")))


def write_results(
    rows: Mapping[str, Mapping[str, Any]], *, only_add: bool, torch: str, samples: int
) -> None:
    """Write the classes of ``rows`` to ``results.json``; ``only_add`` keeps earlier results."""
    results = read_results().results if only_add and RESULTS.exists() else {}
    for entry, row in rows.items():
        name, dtype, mode = entry.rsplit("/", 2)
        if row["class"] != "none":
            source = "+".join(row["joint"]) if mode == "auto" else ""
            remark = _refusal(row) or source
            results.setdefault(f"{dtype}/{mode}", {})[name] = f"{row['class']} {remark}".strip()
    ordered = {kind: dict(sorted(names.items())) for kind, names in sorted(results.items())}
    content = {"torch": torch, "samples": samples, "results": ordered}
    RESULTS.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")


def _refusal(row: Mapping[str, Any]) -> str:
    """Return in short why a case of ``row`` is refused; empty if the row has another class."""
    if row["class"] != "refused":
        return ""
    reason = next(u["reason"] for u in row["unfit"] if u["result"] == "refused")
    reason = " ".join(reason.partition(": ")[2].split())
    reason = re.sub(r"^.*it stopped at .*?: (?!\d)", "", reason)
    return reason.replace("|", "/")[:90]


def write_document() -> None:
    """Write ``docs/operators.md``."""
    DOCUMENT.write_text(document(read_results()), encoding="utf-8")


def document(measured: Measured) -> str:
    """Return the text of the page for the measured results."""
    results = measured.results
    forward = [kind for kind in results if kind.endswith("/forward")]
    gradients = [kind for kind in results if kind.endswith("/auto")]
    dtypes = " ".join(dict.fromkeys(kind.split("/")[0] for kind in results))
    modes = " ".join(sorted({kind.split("/")[1] for kind in results}, key="forward auto".find))
    parts = [
        _HEAD.format(
            dtypes=dtypes,
            modes=modes,
            torch=measured.torch,
            samples=f", at most {measured.samples} samples of an operator" * bool(measured.samples),
        ),
        _summary(results),
        _usage(),
        _table("Forward", forward, results),
        _table("Gradients", gradients, results),
        _admitted(),
    ]
    return "\n".join(parts)


def _summary(results: Results) -> str:
    lines = [
        "## Summary",
        "",
        _wrapped(
            "Left out: " + ", ".join(f"{n} ({c})" for n, c in sorted(left_out().items())) + "."
        ),
        "",
        "| | entries | right | " + " | ".join(CLASSES[::-1]) + " |",
        "|---|" + "---|" * (len(CLASSES) + 2),
    ]
    for kind, names in results.items():
        counts = Counter(value.split()[0] for value in names.values())
        numbers = " | ".join(str(counts[c]) for c in CLASSES[::-1])
        lines.append(f"| {kind} | {len(names)} | {share_right(counts):.1%} | {numbers} |")
    return "\n".join([*lines, ""])


def _usage() -> str:
    usage = read_usage()
    listed = most_used(usage)
    calls = [name for name in listed if not is_native(name)]
    share = 1 - len(calls) / COUNT
    return (
        _wrapped(
            f"Of the {COUNT} operators most used in {usage['models']} models "
            f"(`python -m tests.conformance.usage`) {share:.0%} are native. The others: "
            + ", ".join(f"`{name}`" for name in calls)
            + "."
        )
        + "\n"
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _table(title: str, kinds: list[str], results: Results) -> str:
    names = sorted({name for kind in kinds for name in results[kind]})
    lines = [
        f"## {title}",
        "",
        "| operator | " + " | ".join(kind.split("/")[0] for kind in kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for name in names:
        cells = [_cell(results[kind].get(name, "")) for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _cell(value: str) -> str:
    word, _, source = value.partition(" ")
    word = _WORDS.get(word, word)
    return f"{word}, {source}" if source else word


def _admitted() -> str:
    table = admitted_table()["converters"]
    lines = ["## Converters", "", "ATen operators that become Relax, and the dtypes.", ""]
    lines += [f"- `{name}`: {' '.join(sorted(dtypes))}" for name, dtypes in table.items()]
    return "\n".join([*lines, ""])
