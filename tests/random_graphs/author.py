"""Write a program line by line; each line runs in eager PyTorch as soon as it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.random_graphs.program import NAMES, Call, Leaf, Program, submodule

LARGEST, MOST_ELEMENTS = 50.0, 400
# Least distances of values from a kink, larger than rounding errors: up to float32, and in half
# precisions.
GAP, HALF_GAP = 2e-3, 0.1
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Candidate:
    """A proposed line of a program, which the author may decline.

    Args:
        text: an expression, or a statement if ``statement`` is set.
        reads: the names of the values that the line reads.
        kinks: expressions whose zeros are the points where the line's function is discontinuous
            or has a kink. Their values must not be close to zero; exact zeros are allowed if all
            values that the line reads are exact.
        singular: expressions whose values must be neither zero nor close to it.
        exact: whether the result has no rounding error if the values that the line reads have
            none.
        statement: whether ``text`` is a statement.
        writes: the name of the value that the line writes into; empty if none.
        draws: whether the line draws random numbers.
        results: the length of the tuple that the expression returns; 0 if it is a single value.
    """

    text: str
    reads: tuple[str, ...]
    kinks: tuple[str, ...] = ()
    singular: tuple[str, ...] = ()
    exact: bool = False
    statement: bool = False
    writes: str = ""
    draws: bool = False
    results: int = 0


class Author:
    """Writes a program, and runs each line in train mode and in eval mode.

    The author declines a line if rounding decides its value, or if the value is too large.

    Args:
        dtype: the dtype of the leaves.
        special: whether leaves have NaN and infinities; any values are allowed then.
        writes_inputs: whether lines may write into arguments.
    """

    def __init__(self, dtype: str, special: bool, *, writes_inputs: bool = False) -> None:
        self.dtype, self.special, self.writes_inputs = dtype, special, writes_inputs
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.exact: set[str] = set()
        self.names: list[str] = []
        self.used: set[str] = set()
        # Values that depend on random draws: a draw that no result depends on is not captured.
        self.drawn: set[str] = set()
        self._count = 0
        self.submodules: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str]] = []
        self.numbers: list[str] = []
        self.lists: list[str] = []
        # PyTorch promotes integers to float32, so a program may round as float32 does.
        self._dtypes = {getattr(torch, dtype)}
        self._scopes: list[dict[str, Any]] = []
        for training in (True, False):
            self._scopes.append({**NAMES, "self": nn.Module().train(training)})
        self._random = [torch.Generator().manual_seed(2).get_state()] * 2

    def leaf(self, leaf: Leaf, given: str = "") -> str:
        """Add a leaf, and return the name that lines use for it.

        If the leaf is an argument, the expression ``given`` over its tensor is passed instead.
        """
        self.leaves.append(leaf)
        for scope in self._scopes:
            owner = scope["self"]
            value: Any = getattr(owner, leaf.tied) if leaf.tied else leaf.tensor(0)
            if value.is_floating_point() and not leaf.tied:
                value.requires_grad_(leaf.requires_grad)
            if leaf.kind != "input":
                setattr(owner, leaf.name, value)
            elif given:
                scope[leaf.name] = eval(given, {**scope, leaf.name: value})
            else:
                scope[leaf.name] = value
        if leaf.values in ("number", "list"):
            (self.numbers if leaf.values == "number" else self.lists).append(leaf.name)
            return leaf.name
        name = leaf.name if leaf.kind == "input" else f"self.{leaf.name}"
        if leaf.values not in ("normal", "special"):
            self.exact.add(name)
        if leaf.kind != "buffer":
            self.names.append(name)
        return name

    def submodule(self, text: str) -> str:
        """Add a submodule, and return the name that lines use for it."""
        name = f"s{len(self.submodules)}"
        self.submodules.append((name, text))
        for scope in self._scopes:
            made = submodule(scope["self"], name, text)
            setattr(scope["self"], name, made.train(scope["self"].training))
        return f"self.{name}"

    def attribute(self, literal: str) -> str:
        """Add an attribute that is no tensor, and return the name that lines use for it."""
        name = f"a{len(self.attributes)}"
        self.attributes.append((name, literal))
        for scope in self._scopes:
            setattr(scope["self"], name, eval(literal))
        return f"self.{name}"

    def value(self, name: str) -> torch.Tensor:
        """Return the tensor of a name in train mode."""
        found: torch.Tensor = eval(name, self._scopes[0])
        return found

    def values(self, fits: Callable[[torch.Tensor], bool]) -> list[str]:
        """Return the names of the tensors that fit, the oldest first."""
        return [name for name in self.names if fits(self.value(name))]

    def is_own(self, name: str) -> bool:
        """Whether lines may write into a value: it shares no leaf's memory and has no stride 0."""
        value = self.value(name)
        storages = {_storage(self.value(n)) for n in self._leaf_names()}
        apart = 0 not in value.stride() or not value.dim()
        return _storage(value) not in storages and apart

    def _leaf_names(self) -> list[str]:
        """Return the names of the leaves that lines may not write into."""
        inputs = [x.name for x in self.leaves if x.kind == "input" and x.is_tensor]
        others = [f"self.{leaf.name}" for leaf in self.leaves if leaf.kind != "input"]
        return others if self.writes_inputs else inputs + others

    def write(self, candidate: Candidate, *, within: str = "") -> bool:
        """Add a line, inside the region ``with {within}:`` if given; return False if declined."""
        count = 0 if candidate.statement else max(1, candidate.results)
        names = [f"v{self._count + n}" for n in range(count)]
        text = candidate.text if candidate.statement else f"{', '.join(names)} = {candidate.text}"
        if within:
            text = f"with {within}:\n    {text}"
        before = list(self._random)
        if not all(self._run(number, text, names, candidate) for number in range(2)):
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
        self._count += count
        self.names += names
        for name in names:
            if drawn:
                self.drawn.add(name)
            if exact or not self.value(name).is_floating_point():
                self.exact.add(name)
        return True

    def _run(self, number: int, text: str, names: list[str], candidate: Candidate) -> bool:
        scope = self._scopes[number]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random[number])
            try:
                if not self._is_clear(scope, candidate):
                    return False
                exec(text, scope)
            except (RuntimeError, IndexError, ValueError, TypeError):
                return False
            state = torch.get_rng_state()
        try:
            if not all(self._is_fit(scope[name]) for name in names):
                return False
        except RuntimeError:  # Autograd may forbid access to a view whose base was written.
            return False
        self._dtypes |= {scope[name].dtype for name in names}
        self._random[number] = state
        return True

    def _is_clear(self, scope: dict[str, Any], candidate: Candidate) -> bool:
        exact = self.exact.issuperset(candidate.reads)
        gap = GAP if self._dtypes.isdisjoint(HALF) else HALF_GAP
        for expressions, zero in ((candidate.kinks, exact), (candidate.singular, False)):
            for expression in expressions:
                distance = eval(expression, scope).detach().abs()
                if bool(((distance < gap) & ((distance > 0) | (not zero))).any()):
                    return False
        return True

    def _is_fit(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.numel() > MOST_ELEMENTS or value.dim() > 5:
            return False
        if self.special or not value.is_floating_point() or not value.numel():
            return True
        return bool(value.isfinite().all()) and float(value.detach().abs().max()) <= LARGEST

    def finish(
        self, returned: str, options: Sequence[tuple[str, str]], calls: Sequence[Call] = ()
    ) -> Program:
        """Return the program; its dtype is the least precise floating dtype of its values."""
        floating = [dtype for dtype in self._dtypes if dtype.is_floating_point]
        dtype = str(max(floating, key=lambda dtype: torch.finfo(dtype).eps)).split(".")[-1]
        return Program(
            dtype,
            tuple(self.leaves),
            tuple(self.lines),
            returned,
            tuple(options),
            tuple(self.submodules),
            tuple(self.attributes),
            tuple(calls),
        )


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
