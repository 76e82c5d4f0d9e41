"""How often code is compiled for sizes that the code so far does not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tvmbridge.runtime.family import Family
from tvmbridge.symbolic.code import Points, SymbolicCode


def _code_from(least: int) -> SymbolicCode:
    points = Points((least, 8), (502, 478), (23, 19))
    return SymbolicCode(points, *[None] * 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("least", "serves"), [(3, False), (2, True)])
def test_small_sizes_that_no_code_serves_compile_once(
    least: int, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []

    def compile_(family: Any, key: Any, matched: Any, bounds: Any) -> SymbolicCode:
        compiled.append(bounds)
        family.compilations += 1
        family.codes[key] = code = _code_from(least)
        return code

    monkeypatch.setattr(Family, "_compile", compile_)
    family: Any = object.__new__(Family)
    family.codes, family._limited = {("eval", (), False): _code_from(5)}, set()
    family.compilations = 1
    for point in ((2, 9), (2, 30), (2, 8)):
        family._related = SimpleNamespace(sizes=lambda leaves, point=point: point)
        code = family._code("eval", (), SimpleNamespace(leaves=()), point)
        assert code.points.hold(point) is serves
    assert compiled == [(2, 2)]
