"""A forward that changes Python's filters of warnings does so once a call, and in no capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report

_ODD = partial(warnings.filterwarnings, "ignore", "an odd message")
CHANGES: dict[str, Callable[[], object]] = {
    "simplefilter": partial(warnings.simplefilter, "ignore"),
    "filterwarnings": _ODD,
    "appended": partial(_ODD, append=True),
    "resetwarnings": warnings.resetwarnings,
}
HERE: Any = ("once", None, FutureWarning, None, 7)


@pytest.fixture(autouse=True)
def _filters_kept() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(HERE[0], HERE[2], HERE[4])
        yield


class Changing(nn.Module):
    """Calls ``change`` between layers; then raises if ``fails``."""

    def __init__(self, change: Callable[[], object], *, fails: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Sigmoid())
        self.change = change
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        self.change()
        if self.fails:
            raise ValueError("forward fails")
        return self.layers(x)


def _by_eager(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    with warnings.catch_warnings():
        return Changing.forward(module, x), list(warnings.filters)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("training", [False, True])
def test_a_refused_capture_leaves_the_filters(change: str, fails: bool, training: bool) -> None:
    module = Changing(CHANGES[change], fails=fails).train(training)
    before = list(warnings.filters)
    expected = "refuses this sample" if fails else "leaves the filters of warnings changed"
    with pytest.raises(CaptureError, match=expected):
        add_tvm_dispatch(module, torch.ones(2, 3))
    assert warnings.filters == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_leaves_the_filters_of_eagers_call(change: str) -> None:
    module = add_tvm_dispatch(Changing(CHANGES[change]).eval())
    before, x = list(warnings.filters), torch.randn(2, 3)
    for _ in range(3):
        warnings.filters = list(before)
        expected, filters = _by_eager(module, x)
        torch.testing.assert_close(module(x), expected)
        assert warnings.filters == filters
    assert all("filters of warnings" in reason for reason in dispatch_report(module).fallbacks)


def test_filters_of_a_region_are_served() -> None:
    def change() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("a warning of forward", stacklevel=2)

    before = list(warnings.filters)
    module = add_tvm_dispatch(Changing(change).eval(), torch.ones(2, 3))
    assert warnings.filters == before
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x), _by_eager(module, x)[0])
    assert dispatch_report(module).fallbacks == {}
    assert warnings.filters == before


def test_filters_that_are_in_force_already_are_served() -> None:
    warnings.simplefilter("ignore")
    module = add_tvm_dispatch(Changing(CHANGES["simplefilter"]).eval(), torch.ones(2, 3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x), _by_eager(module, x)[0])
    assert dispatch_report(module).fallbacks == {}


def test_filters_that_an_import_of_forward_adds_stay(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'import warnings\nwarnings.filterwarnings("ignore", "of an import")\n'
    (tmp_path / "adds_a_filter.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def change() -> None:
        import adds_a_filter  # type: ignore[import-not-found]  # noqa: F401

    before = list(warnings.filters)
    add_tvm_dispatch(Changing(change).eval(), torch.ones(2, 3))
    assert next(each for each in warnings.filters if each not in before)[0] == "ignore"
