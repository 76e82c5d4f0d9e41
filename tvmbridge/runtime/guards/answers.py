"""The guard of answers: whether conditions on buffers' values still have their captured results.

Forward may branch on the value of a buffer, as in ``if self.initialized.item()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tvmbridge.backends import is_on_host
from tvmbridge.core.assumptions import Answer
from tvmbridge.core.called_in_mode import without_gradients


class AnswerGuard:
    """Evaluates again the conditions on buffers that forward evaluated during capture.

    It compares values, not versions: code often sets flags without a new version
    (``flag.data.copy_(...)``).

    Args:
        answers: the conditions, with the buffers that they read and their captured results.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.names = tuple(sorted({name for answer in answers for name in answer.names}))
        self._answers = answers
        # Copies of the buffers at the last check that found all answers unchanged.
        self._last: dict[str, torch.Tensor] = {}

    def changed(self, find: Callable[[str], torch.Tensor | None]) -> str | None:
        """Return a text that names a buffer whose answer has changed; None if none has.

        ``find`` returns the present buffer of a name, or None.
        """
        if not self._answers:
            return None
        now: dict[str, torch.Tensor] = {}
        for name in self.names:
            tensor = find(name)
            if type(tensor) is not torch.Tensor or not is_on_host(tensor.device):
                return f"the buffer {name}, whose value forward asks for,"
            now[name] = tensor
        if self._last and all(_alike(now[name], last) for name, last in self._last.items()):
            return None
        for answer in self._answers:
            # Compared as text, because NaN is equal to NaN here.
            if without_gradients(_asked, answer, now) != repr(answer.value):
                which = ", ".join(sorted(answer.names))
                return f"what forward asks of the buffer {which}"
        self._last = {name: tensor.detach().clone() for name, tensor in now.items()}
        return None


def _asked(answer: Answer, now: dict[str, torch.Tensor]) -> str | None:
    """Return the present answer as text; None if evaluating it raises an error."""
    try:
        return repr(answer.ask(now))
    except Exception:
        return None


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype is other.dtype and torch.equal(tensor, other)
