"""The data of the demo: short remarks about products, each labelled with its topic."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch

_FILE = Path(__file__).with_name("remarks.tsv")


@dataclass(frozen=True)
class Remarks:
    """Sentences and their topics; ``labels[i]`` is the index in ``topics`` of ``sentences[i]``."""

    sentences: tuple[str, ...]
    labels: torch.Tensor
    topics: tuple[str, ...]


def load_remarks() -> Remarks:
    """Load all remarks; their topics alternate, so that any part of the sequence is balanced."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    topics = tuple(dict.fromkeys(row["topic"] for row in rows))
    labels = torch.tensor([topics.index(row["topic"]) for row in rows])
    return Remarks(tuple(row["remark"] for row in rows), labels, topics)
