"""META.json: the target, TVM version and machine that a folder's records were measured with."""

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
from tvmbridge.core.own_files import replace_file
from tvmbridge.core.plain_json import parse_json
from tvmbridge.records.jsonlines import read_own
from tvmbridge.schedules.target import core_count, usable_cores

NAME = "META.json"
_NAMED = ("kind", "mcpu", "num-cores")
_WITHOUT_MEANING = ("tag", "keys")


@dataclass(frozen=True)
class Meta:
    """The content of META.json.

    - ``tvm``: the version of TVM. A record is a sequence of TVM's own scheduling steps, so another
      version may not apply it.
    - ``target``: the target in JSON form; records are applied for equal targets only.
    - ``cpu``, ``cores``, ``date``: the machine and the day of the measurement, for people.
    """

    tvm: str
    target: dict[str, Any]
    cpu: str
    cores: int
    date: str

    @staticmethod
    def of(target: Target) -> Meta:
        """Return the values of this machine, this TVM and today for ``target``."""
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return Meta(tvm.__version__, target_json(target), cpu_model(), usable_cores(), today)

    def refusal(self, target: Target) -> str | None:
        """Return why this TVM may not use the records for ``target``; None if it may."""
        if self.tvm != tvm.__version__:
            return f"it was made by TVM {self.tvm!s:.40}, this is TVM {tvm.__version__}"
        if self.target != target_json(target):
            mine, theirs = json.dumps(target_json(target)), json.dumps(self.target)
            return f"it is for the target {theirs:.300}, the code for {mine}"
        return None


def target_json(target: Target) -> dict[str, Any]:
    """Return the attributes of a target that affect code, in plain JSON."""
    attributes = json.loads(str(target))
    return {
        name: value for name, value in sorted(attributes.items()) if name not in _WITHOUT_MEANING
    }


def target_name(target: Target) -> str:
    """Return the name of a target's folder: kind, processor, cores, and a digest of the rest."""
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
    """Return the content of the folder's META.json, or a text that says why it cannot be used."""
    try:
        content = parse_json(read_own(folder / NAME))
        return Meta(**{name: content[name] for name in Meta.__dataclass_fields__})
    except FileNotFoundError:
        return f"it has no {NAME}, which says for which target and TVM it is"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {NAME} cannot be read: {type(error).__name__}: {error}"


def write_meta(folder: Path, meta: Meta) -> None:
    """Write META.json; a reader sees the old file or the new one, never a part."""
    replace_file(folder / NAME, (json.dumps(asdict(meta), indent=2) + "\n").encode())
