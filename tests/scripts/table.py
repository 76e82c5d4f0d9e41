"""The table of scripts."""

from __future__ import annotations

import importlib

_FILES = (
    "state",
    "agents",
    "training",
    "custom",
    "data",
    "inputs",
    "graph_networks",
    "language",
    "vision",
    "changes",
    "blocks",
    "loops",
    "usual",
    "objectives",
    "parts_of_models",
    "served",
)


def load() -> None:
    """Import the files of scripts, which enter theirs into ``SCRIPTS``."""
    for name in _FILES:
        importlib.import_module(f"tests.scripts.{name}")
