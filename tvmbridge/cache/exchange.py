"""Export code, choices of kernels and tuning records into a bundle, and import them from one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tvmbridge.backends import BACKENDS
from tvmbridge.cache.bundle import BundleError, Part, read_bundle, write_bundle
from tvmbridge.cache.key import CacheKey
from tvmbridge.cache.store import SUFFIX, DamagedFileError, Store, parse_file
from tvmbridge.cache.surroundings import machine
from tvmbridge.core.compiled_half import HALVES, half_path
from tvmbridge.core.errors import first_line
from tvmbridge.core.half_build import HalfError, prepare_folder
from tvmbridge.core.machine import SWITCH, caching_is_off
from tvmbridge.core.own_files import read_own, replace_file
from tvmbridge.core.plain_json import parse_json
from tvmbridge.kernels.table import PATTERN, adopt_choices
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS
from tvmbridge.records.library import VARIABLE, named_log_dir
from tvmbridge.records.meta import NAME as META

_RECORD_FILES = (META, WORKLOADS, RECORDS, VERDICTS)
_MOST_RECORDS = 2**28
_MOST_BUNDLED = 2**30


@dataclass
class BundleReport:
    """The parts that an export wrote into a bundle, or that an import took from it.

    - ``path``: the bundle.
    - ``counts``: the number of parts taken, by kind.
    - ``left_out``: the number of parts left out, by kind and reason.
    """

    path: Path
    counts: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, reason: str | None) -> None:
        """Count a part as left out for ``reason``, or as taken if that is None."""
        if reason is None:
            self.counts[kind] += 1
        else:
            self.left_out[f"{kind}: {reason}"] += 1

    def __str__(self) -> str:
        taken = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.counts.items()))
        lines = [f"{self.path}: {taken or 'nothing'}"]
        lines += [f"left out, {count} of {reason}" for reason, count in self.left_out.items()]
        return "\n".join(lines)


def export_bundle(
    path: Path, digests: Collection[str] | None = None, module: Mapping[str, Any] | None = None
) -> BundleReport:
    """Write code of the cache into a bundle, with the choices of kernels and tuning records.

    Args:
        digests: the digests of the keys whose code is written; None: all code of the cache.
        module: the description of the module that the code belongs to; None: of no single module.

    Raises:
        OSError: the bundle cannot be written.
    """
    report = BundleReport(path)

    def parts() -> Iterator[Part]:
        if module is not None:
            yield Part("module", "module", json.dumps(module).encode())
        yield from _code(Store.of_now(), digests, report)
        yield from _others(report)

    write_bundle(path, parts())
    return report


def import_bundle(path: Path, module: Mapping[str, Any] | None = None) -> BundleReport:
    """Copy the parts of a bundle to the places where compilation looks for them.

    A part that does not fit this machine, or that cannot be written, is left out, and the report
    has the reason. No code of the bundle runs during the import.

    Args:
        module: the description that the bundle's module must have; None: any module will do.

    Raises:
        BundleError: the bundle is damaged, belongs to another module, or the cache is turned off.
        UntrustedFileError: somebody else may have written the bundle.
        OSError: the bundle cannot be read.
    """
    report, store = BundleReport(path), Store.of_now()
    if caching_is_off():
        raise BundleError(f"{path} is not read: {SWITCH} turns the cache off")
    described = None
    for part in read_bundle(path):
        if part.kind == "module":
            described = _content(part)
            if module is not None and described != module:
                raise BundleError(f"{path} is of another module: {_difference(described, module)}")
        elif part.kind == "code":
            _keep_code(store, part, report)
        elif part.kind == "choices":
            report.note("choices", adopt_choices(store.folder / part.name, part.content))
        elif part.kind == "halves":
            report.note("halves", _keep_half(part))
        else:
            report.note("records", _keep_records(part))
    if module is not None and described is None:
        report.note("module", "the bundle does not say of which module it is")
    return report


def _code(store: Store, digests: Collection[str] | None, report: BundleReport) -> Iterator[Part]:
    names = [p.name for p, _ in store.files()] if digests is None else map(_file, digests)
    for name in dict.fromkeys(names):
        try:
            content = read_own(store.folder / name, _MOST_BUNDLED)
            key, _ = parse_file(content)
            if _file(key.digest) != name:
                raise DamagedFileError("it is of another key")
        except (OSError, ValueError, RecursionError) as error:
            report.note("code", first_line(error))
            continue
        report.note(_kind(key), None)
        yield Part("code", key.digest, content)


def _others(report: BundleReport) -> Iterator[Part]:
    folder, records = Store.of_now().folder, named_log_dir(None)
    choices = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    found = [("choices", path, path.name) for path in choices]
    halves = [half_path(half) for half in HALVES.values()]
    found += [("halves", path, path.name) for path in halves if path.is_file()]
    if records is not None:
        for name in _RECORD_FILES:
            paths = sorted(records.glob(f"*/{name}"))
            found += [("records", path, f"{path.parent.name}:{name}") for path in paths]
    for kind, path, name in found:
        try:
            content = read_own(path, _MOST_RECORDS)
        except OSError as error:
            report.note(kind, first_line(error))
            continue
        report.note(kind, None)
        yield Part(kind, name, content)


def _file(digest: str) -> str:
    return f"{digest}{SUFFIX}"


def _kind(key: CacheKey) -> str:
    """Return what a file of the cache has: code, or the plan of code (docs/caching.md)."""
    return "plans" if "plan" in key.entries else "code"


def _keep_code(store: Store, part: Part, report: BundleReport) -> None:
    """Store code or a plan that fits this machine; note in the report why it is left out."""
    try:
        key, kept = parse_file(part.content)
    except (ValueError, RecursionError) as error:
        report.note("code", first_line(error))
        return
    if key.digest != part.name:
        report.note("code", "it is of another key")
        return
    report.note(_kind(key), _misfit(key) or store.write(key, kept))


def _misfit(key: CacheKey) -> str | None:
    """Return why this machine can never load code with this key; None if it can."""
    here = machine()
    kind = "cpu" if key.entries.get("device") == "cpu" else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        return "it is for a GPU, and there is none here"
    here["device"] = BACKENDS[kind].identity(torch.device(kind))
    for name, value in here.items():
        other = key.entries.get(name)
        if other != value:
            return f"it is for another {name}: {other}, and here is {value}"
    return None


def _keep_half(part: Part) -> str | None:
    """Store a compiled C++ extension that is missing; return None, or why it is left out."""
    paths = {half_path(half).name: half_path(half) for half in HALVES.values()}
    path = paths.get(part.name)
    if path is None:
        return "it is for another version of Python, PyTorch or tvmbridge"
    try:
        prepare_folder(path.parent)
        if not path.is_file():
            replace_file(path, part.content)
    except (HalfError, OSError) as error:
        return first_line(error)
    return None


def _keep_records(part: Part) -> str | None:
    """Write tuning records if there are none yet; return None, or why they are left out."""
    folder, (target, _, name) = named_log_dir(None), part.name.partition(":")
    if folder is None:
        return f"{VARIABLE} names no directory for them"
    path = folder / target / name
    if name not in _RECORD_FILES:
        return f"{name} is no file of tuning records"
    try:
        if path.exists() and path.read_bytes() != part.content:
            return f"there are others in {path.parent}; `tvmbridge tune --merge` joins directories"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, part.content)
    except OSError as error:
        return first_line(error)
    return None


def _content(part: Part) -> Any:
    try:
        return parse_json(part.content)
    except ValueError as error:
        raise BundleError(f"the description of the module is damaged: {error}") from None


def _difference(found: Any, expected: Mapping[str, Any]) -> str:
    if not isinstance(found, dict) or found.keys() != expected.keys():
        return "it is described in another way"
    names: Sequence[str] = [n for n in expected if found[n] != expected[n]]
    if "class" in names:
        return f"{found['class']}, and this is {expected['class']}"
    return f"other {', '.join(names)}"
