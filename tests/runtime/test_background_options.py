"""Options of background compilation, and errors that are passed between processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge import BuildError, CaptureError, CompileOptions, add_tvm_dispatch
from tvmbridge.runtime import child as children
from tvmbridge.runtime.background import Background


def test_options_are_checked() -> None:
    assert [CompileOptions(background=b).budget for b in (False, True, 1, 2.5)] == [
        None,
        0.0,
        1.0,
        2.5,
    ]
    for wrong in (-1.0, float("nan"), "yes"):
        with pytest.raises(ValueError, match="background"):
            CompileOptions(background=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_fallback"):
        add_tvm_dispatch(nn.Linear(6, 6), torch.ones(2, 6), budget=1, on_fallback="raise")


def test_errors_keep_their_class_and_what_they_hold() -> None:
    class NarrowError(CaptureError):
        def __init__(self, one: str, other: int) -> None:
            super().__init__(f"{one} {other}")
            self.other = other

    error = children._error_of(*children._described(NarrowError("no", 3)))
    assert (type(error), str(error), vars(error)) == (CaptureError, "no 3", {"other": 3})
    error = children._error_of(*children._described(KeyError("x")))
    assert (type(error), str(error)) == (BuildError, "KeyError: 'x'")
    assert Background(CompileOptions()).run("", error, None, lambda: 7) == 7
