"""Turn checks of values in forward into outputs, so that compiled code raises as eager code does.

``torch._assert_async``, and the validation of arguments in ``torch.distributions`` (``if not
all(valid): raise``), cannot be traced. During a trace of forward each such check passes, and its
condition becomes an additional output, which is checked after each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributions import distribution

from tvmbridge.calls.callers import calling_python_module
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.assumptions import Check
from tvmbridge.core.torch_private import FakeTensor

Noted = list[tuple[torch.Tensor, Check]]

_DISTRIBUTION = Check(
    ValueError,
    "a parameter or a value of a torch.distributions object does not satisfy its "
    "constraint; call the module without TVM to see which",
)
# The function of PyTorch 2.15 that decides such a check; while exporting it would call .cpu().
_DECIDES = "_all_true_or_runtime_assert"
_UNNAMED = "Expected Tensor with single nonzero value, but got zero"


@contextmanager
def noted_checks() -> Iterator[Noted]:
    """Yield a list that collects the checks in the context, each with its condition.

    A condition is a tensor of one bool. For real tensors the check itself also runs.
    """
    found: Noted = []

    def noted(passed: torch.Tensor) -> Any:
        found.append((passed, _DISTRIBUTION))
        return True if isinstance(passed, FakeTensor) else passed

    def noting(genuine: Any, *args: Any, **kwargs: Any) -> Any:
        passed = genuine(*args, **kwargs)
        # Three frames up is the caller: the patch's stub and its call are between.
        of_distribution = (calling_python_module(3) or "").startswith("torch.distributions")
        return noted(passed) if of_distribution else passed

    def deciding(genuine: Any, valid: torch.Tensor, error_message: str) -> Any:
        return noted(valid.all())

    def asserting(genuine: Any, input: Any, assert_msg: str = _UNNAMED) -> None:
        one = isinstance(input, torch.Tensor) and input.numel() == 1
        if not (one and isinstance(input, FakeTensor)):
            genuine(input, assert_msg)
        # A new tensor, because ``input`` may be written later.
        found.append(((input.detach() != 0).reshape(()), Check(RuntimeError, assert_msg)))

    with ExitStack() as stack:
        stack.enter_context(patched_here(torch, "_is_all_true", noting))
        stack.enter_context(patched_here(torch, "_assert_async", asserting))
        if hasattr(distribution, _DECIDES):
            stack.enter_context(patched_here(distribution, _DECIDES, deciding))
        yield found


def raise_unless_passed(passed: Sequence[torch.Tensor], checks: Sequence[Check]) -> None:
    """Raise the error of the first check that did not pass."""
    for one, check in zip(passed, checks, strict=True):
        if not one:
            raise check.error(check.message)
