"""Plant a mistake: load a module of the package with one piece of its source replaced."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import cast

ROOT = Path(__file__).parents[2]
# The environment variable with the name of the mistake that the plugin plants.
VARIABLE = "TVMBRIDGE_PLANT"


@dataclass(frozen=True)
class Plant:
    """One mistake in one module.

    Args:
        name: the mistake's name on the command line.
        part: the part of tvmbridge that it is in, such as converters, rules, passes or runtime.
        module: the module whose source is changed.
        old: a piece of the source that occurs exactly once.
        new: the text that replaces ``old``.
        tests: arguments of pytest that select the tests that must catch the mistake.
        quick: whether these tests take only a few seconds.
    """

    name: str
    part: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    quick: bool = False

    @property
    def path(self) -> Path:
        """Return the file of :attr:`module`."""
        below = self.module.replace(".", "/")
        file = ROOT / f"{below}.py"
        return file if file.exists() else ROOT / below / "__init__.py"

    def changed(self, source: str) -> str:
        """Return ``source`` with the mistake in it.

        Raises:
            ValueError: :attr:`old` does not occur exactly once.
        """
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} occurs {source.count(self.old)} times in {self.module}"
            )
        return source.replace(self.old, self.new)

    def install(self) -> None:
        """Make later imports of :attr:`module` in this process load it with the mistake.

        No file is changed.

        Raises:
            RuntimeError: the module is imported already.
        """
        if self.module in sys.modules:
            raise RuntimeError(f"{self.module} is loaded already; plant in a fresh process")
        sys.meta_path.insert(0, _Finder(self))


class _Loader(SourceFileLoader):
    plant: Plant

    def get_code(self, fullname: str) -> CodeType:
        # The base class's get_code would read and write cached bytecode.
        path = self.get_filename(fullname)
        source = self.plant.changed(Path(path).read_text())
        return cast(CodeType, compile(source, path, "exec", dont_inherit=True))


class _Finder:
    """A finder that handles the plant's module alone."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.plant.module:
            return None
        found = PathFinder.find_spec(name, path, target)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(name, found.origin)
        loader.plant = self.plant
        places = found.submodule_search_locations
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=loader, submodule_search_locations=places
        )
