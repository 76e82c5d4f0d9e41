"""Which versions tvmbridge needs, and the check that they are the ones installed.

The check runs before ``tvm`` is imported, since a wrong pair of apache-tvm and apache-tvm-ffi can
crash the process rather than raise. So nothing here imports what it checks: versions are read from
the installed metadata and from the packages' version files as text.

``setup.py`` reads ``PINS`` and ``MINIMUMS`` from this file's syntax tree: keep both plain literals.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tvmbridge.core.errors import VersionError

PINS: Final[Mapping[str, str]] = {
    "apache-tvm": "0.27.0.post1",
    "apache-tvm-ffi": "0.1.14.post1",
}
MINIMUMS: Final[Mapping[str, str]] = {
    "torch": "2.11",
}
# The newest that was tested; with a newer one tvmbridge warns, and goes on.
NEWEST: Final[Mapping[str, str]] = {
    "torch": "2.14",
}

_MODULES: Final[Mapping[str, str]] = {
    "apache-tvm": "tvm",
    "apache-tvm-ffi": "tvm_ffi",
    "torch": "torch",
}
_VERSION_FILES: Final = ("_version.py", "version.py")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackageVersion:
    """What is installed of one package, against what is needed.

    ``metadata`` is what the package's metadata says, ``source`` what the version file of the
    importable module says; either is None where there is nothing to read.
    """

    name: str
    needed: str
    importable: bool
    metadata: str | None
    source: str | None

    @property
    def found(self) -> str | None:
        """The version of the code that an import would load, as far as it can be known."""
        return self.source or self.metadata

    @property
    def problem(self) -> str | None:
        """What is wrong, in words; None when nothing is known to be wrong."""
        if not self.importable:
            return f"{self.name} is not installed, tvmbridge needs {self.name}{self.needed}"
        for version in (self.metadata, self.source):
            if version is not None and not _satisfies(self.name, version):
                return (
                    f"{self.name} {version} is installed, tvmbridge needs {self.name}{self.needed}"
                )
        return None

    @property
    def newer(self) -> str | None:
        """In words, that the version is newer than the newest that was tested; None: it is not."""
        newest = NEWEST.get(self.name)
        if newest is None or self.found is None:
            return None
        parts = len(_release(newest))
        if _release(self.found)[:parts] <= _release(newest):
            return None
        return f"{self.name} {self.found} is newer than {newest}, the newest that was tested"


def fix_command() -> str:
    """The pip command that installs versions which work together."""
    pins = " ".join(f"{name}=={version}" for name, version in PINS.items())
    minimums = " ".join(f"'{name}>={version}'" for name, version in MINIMUMS.items())
    return f"{Path(sys.executable).name} -m pip install {pins} {minimums}"


def installed_versions() -> list[PackageVersion]:
    """Reads the versions of the packages that tvmbridge is bound to, without importing them."""
    needed = {name: f"=={version}" for name, version in PINS.items()}
    needed |= {name: f">={version}" for name, version in MINIMUMS.items()}
    return [_installed_version(name, bound) for name, bound in needed.items()]


def check_versions() -> None:
    """Raises :class:`VersionError` unless the pinned pair and a new enough torch are installed.

    A version that cannot be determined, or is newer than those that were tested, is logged as a
    warning and let pass.
    """
    packages = installed_versions()
    problems = [package.problem for package in packages if package.problem is not None]
    if problems:
        raise VersionError(f"{'; '.join(problems)}. To fix it: {fix_command()}")
    for package in packages:
        if package.found is None:
            _log.warning(
                "the version of %s cannot be determined; tvmbridge needs %s%s",
                package.name,
                package.name,
                package.needed,
            )
        elif package.newer is not None:
            _log.warning("%s; `python -m tvmbridge doctor` examines it", package.newer)


def running_doctor() -> bool:
    """Whether this is ``python -m tvmbridge doctor``, whose task is to explain a wrong pair.

    So it is with ``--version`` and ``--help``, which load nothing.
    """
    words = zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    commands = ("doctor", "--version", "--help", "-h")
    return any(Path(name).stem == "tvmbridge" and command in commands for name, command in words)


def versions_text() -> str:
    """What is installed, on one line for a report: ``torch 2.13.0, ..., Python 3.11.2``."""
    found = [f"{p.name} {p.found or 'not installed'}" for p in installed_versions()]
    return ", ".join([*found, f"Python {sys.version.split()[0]}"])


def _installed_version(name: str, needed: str) -> PackageVersion:
    folder = _module_folder(_MODULES[name])
    return PackageVersion(
        name=name,
        needed=needed,
        importable=folder is not None,
        metadata=_metadata_version(name),
        source=None if folder is None else _source_version(folder),
    )


def _metadata_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _module_folder(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # it is loaded already, by something that gave it no spec
        spec = None
    if spec is None:
        return None
    # A folder without __init__.py is found as a namespace package: what pip leaves behind, not the
    # module.
    return None if spec.origin is None else Path(spec.origin).parent


def _source_version(folder: Path) -> str | None:
    """Reads ``__version__`` as text from the module's files: TVM may be unpacked, not installed."""
    for path in (folder / name for name in _VERSION_FILES):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            version = _assigned_version(node)
            if version is not None:
                return version
    return None


def _assigned_version(node: ast.stmt) -> str | None:
    if not isinstance(node, ast.Assign):
        return None
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    if "__version__" not in names or not isinstance(node.value, ast.Constant):
        return None
    return node.value.value if isinstance(node.value.value, str) else None


def _satisfies(name: str, version: str) -> bool:
    public = version.split("+", 1)[0]
    if name in PINS:
        return public == PINS[name]
    return _release(public) >= _release(MINIMUMS[name])


def _release(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()
