"""Check the instruction sets of this processor, by the names that Linux uses."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmbridge_runtime.errors import MachineError


def check_processor(target: Mapping[str, Any]) -> None:
    """Check that this processor has everything that the code's target needs.

    Raises:
        MachineError: the architecture differs, or an instruction set is missing.
    """
    machine = platform.machine().lower()
    if machine != target["architecture"]:
        raise MachineError(
            f"the code is for {target['architecture']} processors, and this is {machine}: export "
            "it for this one"
        )
    present = _features()
    missing = [name for name in target["features"] if present and name not in present]
    if missing:
        raise MachineError(
            f"the code is for {target['cpu']} and needs {', '.join(missing)}, which this processor "
            "does not have: export it for this one, with target="
        )


def _features() -> frozenset[str]:
    """Return the names of the instruction sets; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
