"""Validation in ``torch.distributions``: what is checked at each call, and raises.

A distribution looks at the values of its parameters (``if not all(valid): raise``), which cannot
be traced. While forward is traced each of these checks passes and is noted; it becomes one more
result of the compiled code, which is looked at after the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tvmbridge.observing.executed import calling_python_module
from tvmbridge.tracing.patches import patched_here


@contextmanager
def noted_checks() -> Iterator[list[torch.Tensor]]:
    """Collects the checks of distributions: tensors of one bool. Real ones are judged too."""
    found: list[torch.Tensor] = []

    def noting(genuine: Any, *args: Any, **kwargs: Any) -> Any:
        passed = genuine(*args, **kwargs)
        # The patch's call and its stub stand between this function and who calls it.
        if not (calling_python_module(3) or "").startswith("torch.distributions"):
            return passed
        found.append(passed)
        return True if isinstance(passed, FakeTensor) else passed

    with patched_here(torch, "_is_all_true", noting):
        yield found


def raise_unless_passed(checks: Sequence[torch.Tensor]) -> None:
    """Raise what a distribution raises where a check of a call did not pass."""
    if not all(checks):
        raise ValueError(
            "a parameter or a value of a torch.distributions object does not satisfy its "
            "constraint; call the module without TVM to see which"
        )
