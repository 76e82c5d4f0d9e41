"""A program while it is written: each line runs as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.random_graphs.program import Leaf, Program

LARGEST, MOST_ELEMENTS = 50.0, 400
# Further from a kink than rounding can take a value, in float32 too.
GAP = 2e-3


@dataclass(frozen=True)
class Candidate:
    """A line that might be written.

    Args:
        text: an expression, or a statement where ``statement`` is set.
        reads: the values that it names.
        kinks: expressions that may be zero only exactly: the line jumps or bends there.
        singular: expressions that may not come near zero at all.
        exact: a result of exact values is exact.
        writes: the value that it writes into.
        draws: it draws random numbers.
    """

    text: str
    reads: tuple[str, ...]
    kinks: tuple[str, ...] = ()
    singular: tuple[str, ...] = ()
    exact: bool = False
    statement: bool = False
    writes: str = ""
    draws: bool = False


class Author:
    """Writes a program, in train and in eval mode at once.

    Lines whose value would be decided by rounding, or too large, are declined; programs with NaN
    and infinities among their leaves may have any values.
    """

    def __init__(self, dtype: str, special: bool) -> None:
        self.dtype, self.special = dtype, special
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.exact: set[str] = set()
        self.names: list[str] = []
        self.used: set[str] = set()
        # What draws went into: a draw that no result depends on is not captured.
        self.drawn: set[str] = set()
        self._count = 0
        # Integers become float32, whose rounding then is that of the whole program.
        self._narrow = False
        self._scopes: list[dict[str, Any]] = []
        for training in (True, False):
            owner = SimpleNamespace(training=training)
            self._scopes.append({"torch": torch, "F": F, "self": owner})
        self._random = [torch.Generator().manual_seed(2).get_state()] * 2

    def leaf(self, leaf: Leaf) -> str:
        """Add a leaf; the text by which lines name it."""
        self.leaves.append(leaf)
        for scope in self._scopes:
            owner = scope["self"]
            value = getattr(owner, leaf.tied) if leaf.tied else leaf.tensor(0)
            if value.is_floating_point() and not leaf.tied:
                value.requires_grad_(leaf.requires_grad)
            if leaf.kind == "input":
                scope[leaf.name] = value
            else:
                setattr(owner, leaf.name, value)
        name = leaf.name if leaf.kind == "input" else f"self.{leaf.name}"
        if leaf.values not in ("normal", "special"):
            self.exact.add(name)
        if leaf.kind != "buffer":
            self.names.append(name)
        return name

    def value(self, name: str) -> torch.Tensor:
        """The tensor of a name, in train mode."""
        found: torch.Tensor = eval(name, self._scopes[0])
        return found

    def values(self, fits: Callable[[torch.Tensor], bool]) -> list[str]:
        """The names whose tensors fit, the oldest first."""
        return [name for name in self.names if fits(self.value(name))]

    def is_own(self, name: str) -> bool:
        """Whether a value may be written into: no leaf's memory, each element once."""
        value = self.value(name)
        storages = {self.value(n).untyped_storage().data_ptr() for n in self._leaf_names()}
        apart = 0 not in value.stride() or not value.dim()
        return value.untyped_storage().data_ptr() not in storages and apart

    def _leaf_names(self) -> list[str]:
        return [leaf.name if leaf.kind == "input" else f"self.{leaf.name}" for leaf in self.leaves]

    def write(self, candidate: Candidate, *, quiet: bool = False) -> bool:
        """Write a line; False where it is declined. ``quiet`` puts it under ``no_grad``."""
        name = f"v{self._count}"
        text = candidate.text if candidate.statement else f"{name} = {candidate.text}"
        if quiet:
            text = f"with torch.no_grad():\n    {text}"
        before = list(self._random)
        if not all(self._run(number, text, name, candidate) for number in range(2)):
            self._random = before
            return False
        self.lines.append(text)
        self.used.update(candidate.reads)
        exact = candidate.exact and self.exact.issuperset(candidate.reads)
        drawn = candidate.draws or not self.drawn.isdisjoint(candidate.reads)
        if candidate.writes:
            storage = self.value(candidate.writes).untyped_storage().data_ptr()
            sharing = {n for n in self.names if _storage(self.value(n)) == storage}
            self.exact -= sharing
            if drawn:
                self.drawn |= sharing
                self.used -= sharing
        if candidate.statement:
            return True
        self._count += 1
        self.names.append(name)
        if drawn:
            self.drawn.add(name)
        if exact or not self.value(name).is_floating_point():
            self.exact.add(name)
        return True

    def _run(self, number: int, text: str, name: str, candidate: Candidate) -> bool:
        scope = self._scopes[number]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random[number])
            try:
                if not self._is_clear(scope, candidate):
                    return False
                exec(text, scope)
            except (RuntimeError, IndexError, ValueError):
                return False
            state = torch.get_rng_state()
        try:
            if not candidate.statement and not self._is_fit(scope[name]):
                return False
        except RuntimeError:  # Eager refuses to look at a view that was written.
            return False
        if not candidate.statement:
            self._narrow |= scope[name].dtype is torch.float32
        self._random[number] = state
        return True

    def _is_clear(self, scope: dict[str, Any], candidate: Candidate) -> bool:
        exact = self.exact.issuperset(candidate.reads)
        for expressions, zero in ((candidate.kinks, exact), (candidate.singular, False)):
            for expression in expressions:
                distance = eval(expression, scope).detach().abs()
                if bool(((distance < GAP) & ((distance > 0) | (not zero))).any()):
                    return False
        return True

    def _is_fit(self, value: torch.Tensor) -> bool:
        if value.numel() > MOST_ELEMENTS or value.dim() > 5:
            return False
        if self.special or not value.is_floating_point() or not value.numel():
            return True
        return bool(value.isfinite().all()) and float(value.detach().abs().max()) <= LARGEST

    def finish(self, returned: str, options: Sequence[tuple[str, str]]) -> Program:
        """The program."""
        leaves, lines = tuple(self.leaves), tuple(self.lines)
        dtype = "float32" if self._narrow else self.dtype
        return Program(dtype, leaves, lines, returned, tuple(options))


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
