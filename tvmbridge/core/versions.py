"""The package versions that tvmbridge needs, and the check that they are installed.

The check runs before ``tvm`` is imported, since a wrong pair of apache-tvm and apache-tvm-ffi can
crash the process. This module therefore imports none of the packages that it checks. It reads the
versions from the installed metadata, and from the packages' version files as text.

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
# The newest tested versions; tvmbridge warns about newer ones, and continues.
NEWEST: Final[Mapping[str, str]] = {
    "torch": "2.15",
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
    """The installed version of one package, and the version that is needed.

    - ``needed``: the requirement, such as ``>=2.11``.
    - ``importable``: whether the package's module is found.
    - ``metadata``: the version in the package's metadata; None if there is no metadata.
    - ``source``: the version in the version file of the module; None if there is no such file.
    """

    name: str
    needed: str
    importable: bool
    metadata: str | None
    source: str | None

    @property
    def found(self) -> str | None:
        """The version of the module that an import would load; None if it cannot be determined."""
        return self.source or self.metadata

    @property
    def problem(self) -> str | None:
        """A sentence that says what is wrong with the version; None if nothing is known to be."""
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
        """A sentence saying that the version is newer than any tested one; None if it is not."""
        newest = NEWEST.get(self.name)
        if newest is None or self.found is None:
            return None
        parts = len(_release(newest))
        if _release(self.found)[:parts] <= _release(newest):
            return None
        return f"{self.name} {self.found} is newer than {newest}, the newest that was tested"


def fix_command() -> str:
    """Return the pip command that installs versions which work together."""
    pins = " ".join(f"{name}=={version}" for name, version in PINS.items())
    minimums = " ".join(f"'{name}>={version}'" for name, version in MINIMUMS.items())
    return f"{Path(sys.executable).name} -m pip install {pins} {minimums}"


def installed_versions() -> list[PackageVersion]:
    """Read the versions of the packages that tvmbridge requires, without importing them."""
    needed = {name: f"=={version}" for name, version in PINS.items()}
    needed |= {name: f">={version}" for name, version in MINIMUMS.items()}
    return [_installed_version(name, bound) for name, bound in needed.items()]


def check_versions() -> None:
    """Raise :class:`VersionError` unless the pinned pair and a new enough torch are installed.

    A version that cannot be determined, or is newer than the tested ones, is accepted with a
    warning in the log.
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
    """Whether this process runs ``python -m tvmbridge`` with a command that needs no version check.

    The command ``doctor`` explains wrong versions; ``--version`` and ``--help`` load nothing.
    """
    words = zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    commands = ("doctor", "--version", "--help", "-h")
    return any(Path(name).stem == "tvmbridge" and command in commands for name, command in words)


def versions_text() -> str:
    """Return the installed versions on one line: ``torch 2.13.0, ..., Python 3.11.2``."""
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
    except ValueError:  # it is loaded already, and has no spec
        spec = None
    if spec is None:
        return None
    # pip may leave behind a folder without __init__.py, which is found as a namespace package.
    return None if spec.origin is None else Path(spec.origin).parent


def _source_version(folder: Path) -> str | None:
    """Read ``__version__`` as text from the module's files: TVM may be unpacked, not installed."""
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
