"""The calls that are checked, by the values of the option and of the environment variable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge import CompileOptions, add_tvm_dispatch
from tvmbridge.core.checks import VARIABLE, CheckPolicy


@pytest.mark.parametrize(
    ("word", "calls"),
    [
        ("never", []),
        ("first", [1]),
        ("growing", [1, 2, 4, 8]),
        ("every:3", [1, 4, 7]),
        ("every:1", list(range(1, 9))),
        ("always", list(range(1, 9))),
    ],
)
def test_the_calls_that_are_due(word: str, calls: list[int]) -> None:
    policy = CheckPolicy(word)
    assert [n for n in range(1, 9) if policy.due(n)] == calls


@pytest.mark.parametrize("word", ["often", "every:0", "every:", "1", 3, None])
def test_other_words_are_refused(word: object) -> None:
    with pytest.raises(ValueError, match=r"CompileOptions\.check: no calls are called"):
        CompileOptions(check=word)  # type: ignore[arg-type]


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CheckPolicy.of_now("first").word == "first"
    for named, word in {"1": "growing", "0": "never", "": "never", "every:7": "every:7"}.items():
        monkeypatch.setenv(VARIABLE, named)
        assert CheckPolicy.of_now("first").word == word


def test_a_wrong_word_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="TVMBRIDGE_CHECK: no calls are called 'yes'"):
        add_tvm_dispatch(module, torch.randn(1, 2))
    assert "forward" not in module.__dict__
