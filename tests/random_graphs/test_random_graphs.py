"""Check some drawn programs in the default suite, and more with ``make test-slow``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.random_graphs.__main__ import BAD, main
from tests.random_graphs.check import _overflows, check, is_valid
from tests.random_graphs.outcome import Outcome
from tests.random_graphs.program import Leaf, Program
from tests.random_graphs.reduce import reduced
from tests.random_graphs.runner import KINDS, drawn
from tests.random_graphs.strategy import programs


@settings(
    max_examples=3,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
@given(programs(most=14))
def test_drawn_program(program: Program) -> None:
    outcome = check(program)
    assert outcome.result not in BAD, f"{outcome}\n{program.source()}\n{program.script()}"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", KINDS)
def test_three_hundred_programs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--count", "300", "--seed", "11", "--workers", "2", "--kind", kind]
    assert main(arguments) == 0, capsys.readouterr().out


X = Leaf("x0", "input", (3,), "float64", "grid", True)


def program(*lines: str) -> Program:
    return Program("float64", (X,), lines, f"(v{len(lines) - 1},)")


def test_a_seed_gives_the_same_programs() -> None:
    first, second = (
        [drawn(number, 5, kind) for kind in KINDS for number in range(4)] for _ in "ab"
    )
    assert first == second
    assert len(set(first)) == 8


def test_a_program_survives_its_text() -> None:
    for original in [drawn(number, 6, kind) for kind in KINDS for number in range(4)]:
        assert Program.from_json(original.to_json()) == original


def test_a_reproduction_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(program("v0 = x0 * 2").script(), {})
    assert "result='right'" in capsys.readouterr().out


def test_what_eager_refuses_is_invalid() -> None:
    assert not is_valid(program("v0 = torch.exp(x0)", "v1 = v0.mul_(2) * 3 + x0[5]"))
    assert check(program("v0 = x0.view(7)")).result == "invalid"


def test_numbers_whose_squares_overflow_are_not_judged_and_others_are() -> None:
    largest = "v0 = torch.nan_to_num(torch.where(x0 > 0, x0, torch.inf))"
    assert _overflows(program(largest, "v1 = v0 * 1e-300"), training=False)
    assert not _overflows(program("v0 = torch.where(x0 > 0, x0, torch.inf)"), training=False)
    assert not _overflows(program("v0 = torch.exp(x0) * 1e6"), training=True)
    assert check(program(largest, "v1 = torch.sin(x0)")).result == "right"


def test_what_is_not_needed_is_left_out() -> None:
    lines = ("v0 = x0 + 1", "v1 = v0 * 2", "v2 = torch.cos(v0)", "v3 = v2 + v1")
    original = replace(program(*lines), returned="(v2, v3, v1,)")

    def has_cosine(candidate: Program) -> Outcome:
        return Outcome("wrong" if "cos" in candidate.source() else "right")

    smallest = reduced(original, has_cosine)
    assert smallest.lines == ("v0 = x0 + 1", "v2 = torch.cos(v0)")
    assert smallest.returned == "v2"
