"""Reduce a failing program to the parts that the failure needs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.random_graphs.check import is_valid
from tests.random_graphs.outcome import Outcome
from tests.random_graphs.program import Call, Leaf, Program

Fails = Callable[[Program], bool]


def reduced(program: Program, check: Callable[[Program], Outcome], tries: int = 90) -> Program:
    """Return a smaller program with the same kind of failure.

    The reduction removes calls, results, lines and leaves, and then simplifies the calls. ``check``
    runs at most ``tries`` times, and only on programs that run in eager PyTorch.
    """
    kind = _kind(check(program))
    left = tries

    def fails(candidate: Program) -> bool:
        nonlocal left
        if left <= 0 or candidate == program or not _runs(candidate):
            return False
        left -= 1
        return _kind(check(candidate)) == kind

    for step in (_fewer_calls, _fewer_results, _fewer_lines, _fewer_leaves, _plainer_calls):
        program = step(program, fails)
    return program


def _kind(outcome: Outcome) -> tuple[str, ...]:
    """Return the result and the first two parts of the reason: the mode, and what differs."""
    parts = [part for part in outcome.reason.split(": ") if not part.startswith("call ")]
    return (outcome.result, *[part.split(".")[0] for part in parts[:2]])


def _first(program: Program, candidates: Iterator[Program], fails: Fails) -> Program:
    return next((candidate for candidate in candidates if fails(candidate)), program)


def _fewer_calls(program: Program, fails: Fails) -> Program:
    kept = (program.calls[:n] for n in range(1, len(program.calls)))
    program = _first(program, (replace(program, calls=calls) for calls in kept), fails)
    for number in reversed(range(1, len(program.calls))):
        calls = program.calls[:number] + program.calls[number + 1 :]
        if fails(replace(program, calls=calls)):
            program = replace(program, calls=calls)
    return program


def _fewer_results(program: Program, fails: Fails) -> Program:
    while True:
        smaller = (replace(program, returned=text) for text in _parts(program.returned))
        candidate = _first(program, smaller, fails)
        if candidate == program:
            return program
        program = candidate


def _parts(returned: str) -> Iterator[str]:
    """Yield expressions that return one item of ``returned``, then all items but one."""
    tree = ast.parse(returned, mode="eval").body
    if isinstance(tree, ast.Dict):
        values = tree.values
    elif isinstance(tree, ast.Tuple | ast.List):
        values = tree.elts
    else:
        return
    texts = [ast.unparse(value) for value in values]
    yield from texts
    if len(texts) > 2:
        for left_out in range(len(texts)):
            yield "(" + ", ".join(t for n, t in enumerate(texts) if n != left_out) + ",)"


def _fewer_lines(program: Program, fails: Fails) -> Program:
    size = max(1, len(program.lines) // 2)
    while size:
        start = len(program.lines) - size
        while start > -size:
            lines = program.lines[: max(start, 0)] + program.lines[start + size :]
            if fails(replace(program, lines=lines)):
                program = replace(program, lines=lines)
            start -= size
        size //= 2
    return program


def _fewer_leaves(program: Program, fails: Fails) -> Program:
    for leaf in program.leaves:
        candidate = _without(program, leaf)
        if fails(candidate):
            program = candidate
    for field in ("options", "submodules", "attributes"):
        for item in getattr(program, field):
            kept = tuple(other for other in getattr(program, field) if other != item)
            if fails(replace(program, **{field: kept})):
                program = replace(program, **{field: kept})
    return program


def _without(program: Program, leaf: Leaf) -> Program:
    calls = program.calls
    if leaf in program.arguments:
        place = program.arguments.index(leaf)
        calls = tuple(
            replace(call, arguments=call.arguments[:place] + call.arguments[place + 1 :])
            for call in calls
        )
    leaves = tuple(other for other in program.leaves if other is not leaf)
    return replace(program, leaves=leaves, calls=calls)


def _plainer_calls(program: Program, fails: Fails) -> Program:
    for number in range(len(program.calls)):
        for candidate in _plainer(program.calls[number], program):
            calls = list(program.calls)
            # The call as the loop has already simplified it.
            calls[number] = replace(calls[number], **candidate)
            if fails(replace(program, calls=tuple(calls))):
                program = replace(program, calls=tuple(calls))
    return program


def _plainer(call: Call, program: Program) -> Iterator[dict[str, object]]:
    names = tuple(leaf.name for leaf in program.arguments if leaf.is_tensor)
    if len(names) == len(call.arguments):
        yield {"arguments": names}
    yield {"before": ()}
    for text in call.before:
        yield {"before": (text,)}
    yield {"after": ()}
    for text in call.after:
        yield {"after": (text,)}
    yield from ({"twice": False}, {"used": None}, {"gradients": "grad"}, {"dispatched": False})


def _runs(program: Program) -> bool:
    try:
        return is_valid(program)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return False
