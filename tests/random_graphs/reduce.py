"""A failing program with the lines left out that the failure does not need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.random_graphs.check import is_valid
from tests.random_graphs.outcome import Outcome
from tests.random_graphs.program import Program


def reduced(program: Program, check: Callable[[Program], Outcome], tries: int = 60) -> Program:
    """A smaller program with the same kind of failure.

    Lines are left out in ever smaller pieces, then leaves; ``check`` runs at most ``tries`` times.
    What no longer runs in eager PyTorch is not tried.
    """
    kind = _kind(check(program))
    names = [name for name in _results(program) if name != program.returned]
    left = tries

    def fails(candidate: Program) -> bool:
        nonlocal left
        if left <= 0 or candidate == program or not _runs(candidate):
            return False
        left -= 1
        return _kind(check(candidate)) == kind

    for name in names:
        candidate = replace(program, returned=name)
        if fails(candidate):
            program = candidate
            break
    size = max(1, len(program.lines) // 2)
    while size:
        start = len(program.lines) - size
        while start > -size:
            lines = program.lines[: max(start, 0)] + program.lines[start + size :]
            if fails(replace(program, lines=lines)):
                program = replace(program, lines=lines)
            start -= size
        size //= 2
    for leaf in program.leaves:
        leaves = tuple(other for other in program.leaves if other is not leaf)
        if fails(replace(program, leaves=leaves)):
            program = replace(program, leaves=leaves)
    return program


def _kind(outcome: Outcome) -> tuple[str, ...]:
    """The result, the mode, and the first word of what is said of it."""
    return (outcome.result, *[part.split(".")[0] for part in outcome.reason.split(": ")[:2]])


def _results(program: Program) -> list[str]:
    """The values that are returned, one by one."""
    inner = program.returned.strip("()[]{},")
    return [piece.split(":")[-1].strip() for piece in inner.split(",")]


def _runs(program: Program) -> bool:
    try:
        return is_valid(program)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return False
