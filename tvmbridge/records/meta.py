"""META.json: what the records of a folder were measured for, by what, and where."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from tvmbridge.core.machine import cpu_model
from tvmbridge.core.plain_json import parse_json
from tvmbridge.records.jsonlines import read_own, replace_file
from tvmbridge.schedules.target import core_count, usable_cores

NAME = "META.json"
_NAMED = ("kind", "mcpu", "num-cores")
_WITHOUT_MEANING = ("tag", "keys")


@dataclass(frozen=True)
class Meta:
    """``target`` is the target's JSON; the others are for people, but for ``tvm``.

    A record is a sequence of TVM's own scheduling steps, so it belongs to one version of TVM.
    """

    tvm: str
    target: dict[str, Any]
    cpu: str
    cores: int
    date: str

    @staticmethod
    def of(target: Target) -> Meta:
        """What is true here and now."""
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return Meta(tvm.__version__, target_json(target), cpu_model(), usable_cores(), today)

    def refusal(self, target: Target) -> str | None:
        """Why the records may not be used for ``target`` by this TVM; None if they may."""
        if self.tvm != tvm.__version__:
            return f"it was made by TVM {self.tvm!s:.40}, this is TVM {tvm.__version__}"
        if self.target != target_json(target):
            mine, theirs = json.dumps(target_json(target)), json.dumps(self.target)
            return f"it is for the target {theirs:.300}, the code for {mine}"
        return None


def target_json(target: Target) -> dict[str, Any]:
    """The attributes of a target that decide about code, in plain JSON."""
    attributes = json.loads(str(target))
    return {
        name: value for name, value in sorted(attributes.items()) if name not in _WITHOUT_MEANING
    }


def target_name(target: Target) -> str:
    """The name of a target's folder: kind, processor, cores, and a digest of whatever else."""
    attributes = target_json(target)
    parts = [str(attributes["kind"])]
    if "mcpu" in attributes:
        parts.append(str(attributes["mcpu"]))
    parts.append(f"{core_count(target)}cores")
    others = {name: value for name, value in attributes.items() if name not in _NAMED}
    if others:
        parts.append(hashlib.sha256(json.dumps(others).encode()).hexdigest()[:8])
    return "-".join(parts)


def read_meta(folder: Path) -> Meta | str:
    """The folder's META.json, or why it cannot be used."""
    try:
        content = parse_json(read_own(folder / NAME))
        return Meta(**{name: content[name] for name in Meta.__dataclass_fields__})
    except FileNotFoundError:
        return f"it has no {NAME}, which says for which target and TVM it is"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {NAME} cannot be read: {type(error).__name__}: {error}"


def write_meta(folder: Path, meta: Meta) -> None:
    """Write META.json whole."""
    replace_file(folder / NAME, json.dumps(asdict(meta), indent=2) + "\n")
